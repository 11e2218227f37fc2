"""Negative log-likelihood."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from statewise.component import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from statewise.types import Batch, TokenStats


class NLL(Loss, kind="nll"):
    """-log pi(y_t | s_t), nats; d/dlogits = p - e_y. Needs states that carry gold tokens."""

    needs: ClassVar[tuple[str, ...]] = ("logprobs",)
    reads: ClassVar[tuple[str, ...]] = ("gold",)
    words: ClassVar[str] = "-log p(y)"

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        return -stats.logprobs
