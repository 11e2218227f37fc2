"""Several answers to one prompt, scored for the price of reading the prompt once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from statewise.models.batching import evaluating
from statewise.models.cache import forward_cached
from statewise.models.head import FullLogits, Head, Projection, backbone, split_head
from statewise.models.score import InProcessScorer, score_rows

Group = tuple[Sequence[int], Sequence[Sequence[int]]]  # ids of a prompt, and of each answer


class AnswerScorer(InProcessScorer):
    """A scorer that keeps a prompt's keys and values for all its answers."""

    def score_answers(self, groups: Sequence[Group]) -> list[list[float]]:
        """log p(answer | prompt) in nats, summed over the answer's tokens; no prompt and no answer may be empty."""
        return [[total for total, _ in group] for group in self._judged(groups, ("logprobs",))]

    def judge_answers(self, groups: Sequence[Group]) -> list[list[tuple[float, bool]]]:
        """The same, each with whether every token of the answer is the most probable one."""
        return self._judged(groups, ("logprobs", "rank"))

    def _judged(self, groups: Sequence[Group], needs: Sequence[str]) -> list[list[tuple[float, bool]]]:
        results: list[list[tuple[float, bool]]] = [[] for _ in groups]
        with evaluating(self.model), torch.no_grad():
            for batch in self._batches(groups):
                found = iter(self._score_batch([groups[i] for i in batch], needs))
                for index in batch:
                    results[index] = [next(found) for _ in groups[index][1]]
        return results

    def _batches(self, groups: Sequence[Group]) -> Iterator[list[int]]:
        """Indices by falling prompt length, cut where answers x longest sequence passes `batch_tokens`."""
        batch: list[int] = []
        rows = width = 0
        for index in sorted(range(len(groups)), key=lambda i: (-len(groups[i][0]), i)):
            prompt, answers = groups[index]
            longest = len(prompt) + max(map(len, answers), default=0)
            if batch and (rows + len(answers)) * max(width, longest) > self.batch_tokens:
                yield batch
                batch, rows, width = [], 0, 0
            batch.append(index)
            rows, width = rows + len(answers), max(width, longest)
        if batch:
            yield batch

    def _score_batch(self, groups: Sequence[Group], needs: Sequence[str]) -> list[tuple[float, bool]]:
        """Each answer in a row of its own after the cached prompt; the prompt's last token starts the row."""
        device = next(self.model.parameters()).device
        owner = torch.tensor([g for g, (_, answers) in enumerate(groups) for _ in answers], device=device)
        before, seen = self._padded([prompt[:-1] for prompt, _ in groups], left=True)
        cache = None
        if before.shape[1]:
            _, cache = forward_cached(backbone(self.model), before, seen, None)
            cache.reorder_cache(owner)
        rows = [[prompt[-1], *answer] for prompt, answers in groups for answer in answers]
        ids, mask = self._padded(rows, left=False)
        at = mask[:, 1:].nonzero(as_tuple=True)
        projection = self._project_after(ids[:, :-1], torch.cat([seen[owner], mask[:, :-1]], 1), cache, at)
        scored = score_rows(projection, ids[:, 1:][at], needs, dtype=self.dtype)
        sums = torch.zeros(len(owner), dtype=torch.float64, device=device)
        sums.index_add_(0, at[0], scored["logprobs"].double())
        behind = torch.zeros(len(owner), dtype=torch.long, device=device)
        if "rank" in scored:
            behind.index_add_(0, at[0], scored["rank"])
        return list(zip(sums.tolist(), (behind == 0).tolist(), strict=True))

    def _project_after(
        self, ids: Tensor, mask: Tensor, cache: object, at: tuple[Tensor, ...]
    ) -> Projection | FullLogits:
        if self._head is False:
            self._head = split_head(self.model)
        if isinstance(self._head, Head):
            out, _ = forward_cached(backbone(self.model), ids, mask, cache)
            return self._head.project(out.last_hidden_state[at])
        return FullLogits(forward_cached(self.model, ids, mask, cache)[0].logits[at])

    def _padded(self, sequences: Sequence[Sequence[int]], *, left: bool) -> tuple[Tensor, Tensor]:
        width = max(len(s) for s in sequences)
        ids = torch.full((len(sequences), width), self.pad_id, dtype=torch.long)
        mask = torch.zeros(len(sequences), width, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            place = slice(width - len(sequence), width) if left else slice(0, len(sequence))
            ids[row, place] = torch.tensor(sequence, dtype=torch.long)
            mask[row, place] = 1
        device = next(self.model.parameters()).device
        return ids.to(device), mask.to(device)
