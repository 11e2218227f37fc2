"""Two models at the same states: their next-token distributions compared over the full vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from statewise.errors import DataError
from statewise.models.generate import evaluating
from statewise.models.onepass import chunk_rows
from statewise.models.score import InProcessScorer

COLUMNS = ("kl_ab", "kl_ba", "logprob_a", "logprob_b", "entropy_a", "entropy_b")


@dataclass(frozen=True)
class Compared:
    """What two models say at the chosen states of one sequence, a value a state, in nats.

    kl_ab: KL(A || B) = sum_y a(y) (log a(y) - log b(y)); kl_ba: KL(B || A); logprob_*: of the token that follows;
    entropy_*: of the distribution.
    """

    kl_ab: list[float]
    kl_ba: list[float]
    logprob_a: list[float]
    logprob_b: list[float]
    entropy_a: list[float]
    entropy_b: list[float]


class PairScorer:
    """Model A and model B, which share a vocabulary up to padding, on sequences of token ids."""

    def __init__(self, a: Any, b: Any, *, pad_id: int, batch_tokens: int = 8192):
        self.a = InProcessScorer(a, pad_id=pad_id, batch_tokens=batch_tokens)
        self.b = InProcessScorer(b, pad_id=pad_id, batch_tokens=batch_tokens)

    def compare(self, sequences: Sequence[Sequence[int]], at: Sequence[Sequence[int]]) -> list[Compared]:
        """at: for each sequence, the numbers t >= 1 of the tokens whose states s_t = tokens[:t] are compared."""
        results: list[Compared | None] = [None] * len(sequences)
        for number, (sequence, places) in enumerate(zip(sequences, at, strict=True)):
            if not all(0 < t < len(sequence) for t in places):
                raise DataError(
                    f"sequence {number}: states {list(places)} of {len(sequence)} tokens; expected 1 <= t < that."
                )
        with evaluating(self.a.model), evaluating(self.b.model), torch.no_grad():
            for group in self.a.groups(sequences):
                found = self._compare([sequences[i] for i in group], [at[i] for i in group])
                for index, values in zip(group, found, strict=True):
                    results[index] = values
        return [result for result in results if result is not None]

    def _compare(self, sequences: list[Sequence[int]], at: list[Sequence[int]]) -> list[Compared]:
        device = next(self.a.model.parameters()).device
        width = max(len(s) for s in sequences)
        ids = torch.full((len(sequences), width), self.a.pad_id, dtype=torch.long)
        mask = torch.zeros(len(sequences), width, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(list(sequence))
            mask[row, : len(sequence)] = 1
        ids, mask = ids.to(device), mask.to(device)
        rows = torch.tensor([row for row, places in enumerate(at) for _ in places], dtype=torch.long, device=device)
        columns = torch.tensor([t - 1 for places in at for t in places], dtype=torch.long, device=device)
        inputs = {"input_ids": ids, "attention_mask": mask}
        ours, theirs = (scorer.project(inputs, (rows, columns)) for scorer in (self.a, self.b))
        targets = ids[rows, columns + 1]
        size = chunk_rows(max(ours.num_tokens, theirs.num_tokens), device)
        parts = [_values(ours, theirs, targets, slice(i, i + size)) for i in range(0, len(rows), size)]
        table = torch.cat(parts, 1).tolist() if parts else [[] for _ in COLUMNS]
        counts = [len(places) for places in at]
        starts = [sum(counts[:i]) for i in range(len(counts))]
        return [Compared(*(column[s : s + n] for column in table)) for s, n in zip(starts, counts, strict=True)]


def _values(ours: Any, theirs: Any, targets: torch.Tensor, part: slice) -> torch.Tensor:
    """[6, n], in the order of COLUMNS; ids that only one model has, which are padding, are left out."""
    z_a, z_b = ours.logits(part), theirs.logits(part)
    size = min(z_a.shape[-1], z_b.shape[-1])
    log_a, log_b = z_a[:, :size].log_softmax(-1), z_b[:, :size].log_softmax(-1)
    a, b = log_a.exp(), log_b.exp()
    gap = log_a - log_b
    own = targets[part, None]
    return torch.stack(
        [
            (a * gap).sum(-1).clamp_min(0.0),  # rounding alone makes it negative
            (-b * gap).sum(-1).clamp_min(0.0),
            log_a.gather(-1, own)[:, 0],
            log_b.gather(-1, own)[:, 0],
            -(a * log_a).sum(-1),
            -(b * log_b).sum(-1),
        ]
    )
