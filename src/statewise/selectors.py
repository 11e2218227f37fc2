"""Selectors: which action tokens a term is about, decided from columns before the forward pass.

So the denominators are known before the first backward. A selector returns multipliers [B, T]: 0 leaves a token out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from statewise.component import Selector
from statewise.types import AUTHOR_CODE, Author, Batch, derive_seed

if TYPE_CHECKING:
    from torch import Tensor


class Actions(Selector, kind="actions"):
    """Every action token."""

    def __call__(self, batch: Batch) -> Tensor:
        return batch.action_mask_BT.float()


class ByAuthor(Selector, kind="author"):
    """Action tokens written by `author`."""

    author: Author

    def __call__(self, batch: Batch) -> Tensor:
        return (batch.action_mask_BT & (batch.author_BT == AUTHOR_CODE[self.author])).float()


class ByPosition(Selector, kind="position"):
    """Action tokens number `start` (from 0) up to, not including, `stop`, counted among the sequence's action tokens."""

    start: int = Field(0, ge=0)
    stop: int | None = Field(None, ge=1)

    def __call__(self, batch: Batch) -> Tensor:
        rank = _action_rank(batch)
        inside = rank >= self.start
        if self.stop is not None:
            inside &= rank < self.stop
        return (inside & batch.action_mask_BT).float()


class TopShare(Selector, kind="top"):
    """In each sequence the `share` of action tokens with the largest `by` column; with `compensate`, times T / kept."""

    by: str
    share: float = Field(gt=0, le=1)
    largest: bool = True
    compensate: bool = True

    def columns_read(self) -> frozenset[str]:
        return frozenset({self.by})

    def __call__(self, batch: Batch) -> Tensor:
        return _keep_share(batch.column(self.by), batch, self.share, self.largest, self.compensate)


class RandomShare(Selector, kind="random"):
    """In each sequence a random `share` of the action tokens: a function of (seed, example, token), not of the batch."""

    share: float = Field(gt=0, le=1)
    seed: int = 0
    compensate: bool = True
    reads: ClassVar[tuple[str, ...]] = ()

    def __call__(self, batch: Batch) -> Tensor:
        import torch

        noise = torch.zeros(batch.tokens_BT.shape, dtype=torch.float64)
        sequence_BT = batch.sequence_BT.cpu()
        for index, name in enumerate(batch.example_ids):
            where = sequence_BT == index
            count = int(where.sum())
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "random_share", name))
            noise[where] = torch.rand(count, generator=generator, dtype=torch.float64)
        return _keep_share(noise.to(batch.tokens_BT.device), batch, self.share, True, self.compensate)


def _action_rank(batch: Batch) -> Tensor:
    """Number of action tokens before t in the same sequence, [B, T]."""
    import torch

    rank = torch.zeros_like(batch.tokens_BT)
    for index in range(batch.num_sequences):
        where = (batch.sequence_BT == index) & batch.action_mask_BT
        rank[where] = torch.arange(int(where.sum()), device=rank.device)
    return rank


def _keep_share(key: Tensor, batch: Batch, share: float, largest: bool, compensate: bool) -> Tensor:
    """ceil(share T) tokens a sequence by `key`; ties go to the earlier token."""
    import math

    import torch

    kept = torch.zeros(batch.tokens_BT.shape, dtype=torch.float32, device=key.device)
    for index in range(batch.num_sequences):
        where = ((batch.sequence_BT == index) & batch.action_mask_BT).nonzero(as_tuple=True)
        total = where[0].numel()
        if total == 0:
            continue
        count = math.ceil(share * total)
        order = torch.sort(key[where], descending=largest, stable=True).indices[:count]
        kept[where[0][order], where[1][order]] = total / count if compensate else 1.0
    return kept
