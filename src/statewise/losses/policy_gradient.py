"""Policy-gradient losses on a fixed behaviour policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pydantic

from statewise.component import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from statewise.types import Batch, TokenStats


def clipped_surrogate(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor | float, *, low: float, high: float
) -> Tensor:
    """PPO: -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprobs - behavior_logprobs), elementwise.

    Source: arXiv 1707.06347; with A = 1 it is PSFT, arXiv 2508.17784.
    """
    ratio = (logprobs - behavior_logprobs).exp()
    return -(ratio * advantages).minimum(ratio.clamp(1 - low, 1 + high) * advantages)


class Clip(Loss, kind="clip"):
    """PPO surrogate -min(r A, clip(r) A). `advantages = 1.0` as a constant makes it PSFT on gold tokens."""

    needs: ClassVar[tuple[str, ...]] = ("logprobs",)
    words: ClassVar[str] = "-min(r A, clip(r, 1-low, 1+high) A)"

    low: float = pydantic.Field(0.2, ge=0, lt=1)
    high: float = pydantic.Field(0.2, ge=0)
    advantage: float | None = None

    def columns_read(self) -> frozenset[str]:
        constant = self.advantage is not None
        return frozenset({"behavior_logprobs", "gold" if constant else "advantages"})

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        advantages = batch.column("advantages") if self.advantage is None else self.advantage
        behavior = batch.column("behavior_logprobs")
        return clipped_surrogate(stats.logprobs, behavior, advantages, low=self.low, high=self.high)
