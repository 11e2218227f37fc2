"""Scoring sequences through the one-pass head: no stored logits, float32 statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from statewise.models.head import FullLogits, Head, Projection, backbone, split_head
from statewise.models.onepass import chunk_rows, statistics
from statewise.models.topk import TopK
from statewise.types import TokenStats

NEEDS = ("logprobs", "entropy", "varentropy", "rank", "topk")


def token_stats(
    hidden: Tensor,
    head: Head | nn.Module | Tensor,
    targets: Tensor,
    *,
    entropy: bool = True,
    dtype: torch.dtype | None = None,
) -> TokenStats:
    """Statistics of `targets` [...] at `hidden` [..., D], chunk by chunk, under no_grad.

    head: a `Head`, a linear layer, or a weight [V, D]. Returns TokenStats(logprobs, entropy) of shape [...], float32
    (float64 for float64 inputs), nats; `.phi` is log p + H.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    if isinstance(head, Tensor):
        projection = Projection(((rows, head),))
    else:
        projection = (head if isinstance(head, Head) else Head(head)).project(rows)
    values = score_rows(
        projection, targets.reshape(-1), ("logprobs", "entropy") if entropy else ("logprobs",), dtype=dtype
    )
    shaped = {name: value.reshape(targets.shape) for name, value in values.items()}
    return TokenStats(shaped["logprobs"], shaped.get("entropy"))


@torch.no_grad()
def score_rows(
    projection: Projection | FullLogits,
    targets_N: Tensor,
    needs: Sequence[str] = ("logprobs",),
    *,
    temperature: float = 1.0,
    topk: int = 20,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """{name: [N]} of log p(y), entropy, varentropy sum p (log p + H)^2 (nats^2), rank of y (0 = the mode), and
    `topk_logprobs`/`topk_ids` [N, K]; logits are divided by `temperature` before all of them."""
    unknown = set(needs) - set(NEEDS)
    if unknown:
        raise ValueError(f"needs: received {sorted(unknown)}, expected among {NEEDS}")
    parts: dict[str, list[Tensor]] = {}
    size = chunk_rows(projection.num_tokens, projection.device)
    for start in range(0, projection.num_rows, size):
        part = slice(start, min(start + size, projection.num_rows))
        logits = projection.logits(part, dtype)
        if temperature != 1.0:
            logits = logits / temperature
        for name, value in _score_chunk(logits, targets_N[part], needs, topk).items():
            parts.setdefault(name, []).append(value)
    if not parts:
        empty = torch.zeros(0, device=targets_N.device)
        return {name: empty for name in needs if name != "topk"}
    return {name: torch.cat(values) for name, values in parts.items()}


def _score_chunk(logits: Tensor, targets: Tensor, needs: Sequence[str], topk: int) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    if "rank" in needs:
        out["rank"] = (logits > logits.gather(-1, targets[:, None])).sum(-1)
    if "topk" in needs:
        top = logits.topk(min(topk, logits.shape[-1]), dim=-1)
        out["topk_logprobs"] = top.values - logits.logsumexp(-1, keepdim=True)
        out["topk_ids"] = top.indices
    wants = "entropy" in needs or "varentropy" in needs
    if not {"logprobs", "entropy", "varentropy"} & set(needs):
        return out
    logprobs, entropy, exps, total = statistics(logits, targets, entropy=wants)
    out["logprobs"] = logprobs
    if wants and entropy is not None:
        out["entropy"] = entropy
    if "varentropy" in needs and entropy is not None:
        centred = logits.sub_((total.log() - entropy)[:, None]).clamp_min_(-1e15)
        out["varentropy"] = torch.linalg.vecdot(exps, centred.square()) / total
    return out


class InProcessScorer:
    """The `Scorer` protocol on a transformers or PEFT model. `batch_tokens`: padded tokens a forward pass."""

    def __init__(self, model: Any, *, pad_id: int, batch_tokens: int = 8192, dtype: torch.dtype | None = None):
        self.model, self.pad_id, self.batch_tokens, self.dtype = model, pad_id, batch_tokens, dtype
        self._head: Head | bool | None = False

    def topk(self, sequences: Sequence[Sequence[int]], k: int) -> list[TopK]:
        """Log-probabilities of the tokens and of the k most probable ones at each; all of them where k is the vocabulary."""
        if k == 0:
            scored = [np.asarray(v["logprobs"], np.float32) for v in self.score(sequences)]
            return [TopK(v, np.zeros((len(v), 0), np.int64), np.zeros((len(v), 0), np.float32)) for v in scored]
        return [_as_topk(values) for values in self.score(sequences, ("logprobs", "topk"), topk=k)]

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        needs: Sequence[str] = ("logprobs",),
        *,
        temperature: float = 1.0,
        topk: int = 20,
    ) -> list[dict[str, Any]]:
        """Per sequence {name: list with one value a token}; a sequence's first token has no state: 0 there."""
        results: list[dict[str, Any]] = [{} for _ in sequences]
        training = self.model.training
        self.model.eval()
        try:
            for group in self._groups(sequences):
                for index, values in zip(
                    group, self._score([sequences[i] for i in group], needs, temperature, topk), strict=True
                ):
                    results[index] = values
        finally:
            self.model.train(training)
        return results

    def _groups(self, sequences: Sequence[Sequence[int]]) -> list[list[int]]:
        """Indices by falling length, cut where rows x longest passes `batch_tokens`."""
        order = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i))
        groups: list[list[int]] = []
        for index in order:
            longest = len(sequences[groups[-1][0]]) if groups else 0
            if groups and (len(groups[-1]) + 1) * longest <= self.batch_tokens:
                groups[-1].append(index)
            else:
                groups.append([index])
        return groups

    @torch.no_grad()
    def _score(
        self, sequences: list[Sequence[int]], needs: Sequence[str], temperature: float, topk: int
    ) -> list[dict[str, Any]]:
        width = max(1, *(len(s) for s in sequences))
        device = next(self.model.parameters()).device
        ids = torch.full((len(sequences), width), self.pad_id, dtype=torch.long)
        mask = torch.zeros(len(sequences), width, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.long)
            mask[row, : len(sequence)] = 1
        ids, mask = ids.to(device), mask.to(device)
        at = mask[:, 1:].nonzero(as_tuple=True)
        projection = self._project({"input_ids": ids, "attention_mask": mask}, at)
        flat = score_rows(projection, ids[:, 1:][at], needs, temperature=temperature, topk=topk, dtype=self.dtype)
        return _by_sequence(flat, [len(s) for s in sequences])

    def _project(self, inputs: dict[str, Tensor], at: tuple[Tensor, ...]) -> Projection | FullLogits:
        if self._head is False:
            self._head = split_head(self.model)
        if isinstance(self._head, Head):
            hidden = backbone(self.model)(**inputs, use_cache=False).last_hidden_state
            return self._head.project(hidden[:, :-1][at])
        return FullLogits(self.model(**inputs, use_cache=False).logits[:, :-1][at])


def _as_topk(values: dict[str, list[Any]]) -> TopK:
    width = len(values["topk_ids"][-1])
    ids, best = [[-1] * width, *values["topk_ids"][1:]], [[-np.inf] * width, *values["topk_logprobs"][1:]]
    return TopK(np.asarray(values["logprobs"], np.float32), np.asarray(ids, np.int64), np.asarray(best, np.float32))


def _by_sequence(flat: dict[str, Tensor], lengths: list[int]) -> list[dict[str, Any]]:
    """Cut [N] values of tokens 1.. into one list a sequence, with 0 (an empty list for top-k) for token 0."""
    lists = {name: value.tolist() for name, value in flat.items()}
    out: list[dict[str, Any]] = []
    start = 0
    for length in lengths:
        stop = start + max(length - 1, 0)
        first: dict[str, Any] = {name: [] if name.startswith("topk") else 0.0 for name in lists}
        out.append({n: ([first[n]] if length else []) + v[start:stop] for n, v in lists.items()})
        start = stop
    return out
