"""Policy-gradient losses, with the ratio r = pi(y | s) / mu(y | s) to the behaviour policy mu that wrote the rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from statewise.component import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from statewise.types import Batch, TokenStats


def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A log pi(y | s), elementwise; its gradient is the policy gradient on rollouts of the current policy."""
    return -advantages * logprobs


def clipped_surrogate(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor | float, *, low: float, high: float
) -> Tensor:
    """PPO: -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprobs - behavior_logprobs), elementwise.

    Source: arXiv 1707.06347; with A = 1 it is PSFT, arXiv 2508.17784.
    """
    ratio = (logprobs - behavior_logprobs).exp()
    return -(ratio * advantages).minimum(ratio.clamp(1 - low, 1 + high) * advantages)


def cispo(logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, *, high: float) -> Tensor:
    """CISPO: -sg[min(r, 1 + high)] A log pi: clipped tokens keep a gradient. Source: arXiv 2506.13585."""
    ratio = (logprobs - behavior_logprobs).exp().clamp(max=1 + high).detach()
    return -ratio * advantages * logprobs


class Reinforce(Loss, kind="reinforce"):
    """-A log pi: unbiased for one update on fresh rollouts; no correction for older ones."""

    needs: ClassVar[tuple[str, ...]] = ("logprobs",)
    reads: ClassVar[tuple[str, ...]] = ("advantages",)
    words: ClassVar[str] = "-A log p(y)"

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        return reinforce(stats.logprobs, batch.column("advantages"))


class Clip(Loss, kind="clip"):
    """PPO surrogate -min(r A, clip(r) A). `advantage = 1.0` as a constant makes it PSFT on gold tokens."""

    needs: ClassVar[tuple[str, ...]] = ("logprobs",)
    words: ClassVar[str] = "-min(r A, clip(r, 1-low, 1+high) A)"

    low: float = Field(0.2, ge=0, lt=1)
    high: float = Field(0.2, ge=0)
    advantage: float | None = None

    def columns_read(self) -> frozenset[str]:
        constant = self.advantage is not None
        return frozenset({"behavior_logprobs", "gold" if constant else "advantages"})

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        advantages = batch.column("advantages") if self.advantage is None else self.advantage
        behavior = batch.column("behavior_logprobs")
        return clipped_surrogate(stats.logprobs, behavior, advantages, low=self.low, high=self.high)


class CISPO(Loss, kind="cispo"):
    """-sg[min(r, 1 + high)] A log pi."""

    needs: ClassVar[tuple[str, ...]] = ("logprobs",)
    reads: ClassVar[tuple[str, ...]] = ("advantages", "behavior_logprobs")
    words: ClassVar[str] = "-stop_grad[min(r, 1+high)] A log p(y)"

    high: float = Field(4.0, ge=0)

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        return cispo(stats.logprobs, batch.column("behavior_logprobs"), batch.column("advantages"), high=self.high)


class GSPO(Loss, kind="gspo"):
    """Ratio of whole sequences: s = exp(mean_t log r_t), loss -min(s A, clip(s, 1 - low, 1 + high) A) a sequence.

    A is the mean of the sequence's token advantages. Source: arXiv 2507.18071.
    """

    scope: ClassVar[str] = "sequence"
    needs: ClassVar[tuple[str, ...]] = ("logprobs",)
    reads: ClassVar[tuple[str, ...]] = ("advantages", "behavior_logprobs")
    words: ClassVar[str] = "-min(s A, clip(s, 1-low, 1+high) A), s = exp(mean log r) of the sequence"

    low: float = Field(3e-4, ge=0, lt=1)
    high: float = Field(4e-4, ge=0)

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        from statewise.objective import per_sequence

        ratio, count = per_sequence(stats.logprobs - batch.column("behavior_logprobs"), batch)
        advantages, _ = per_sequence(batch.column("advantages").to(ratio.dtype), batch)
        count = count.clamp_min(1)
        mean_ratio = ratio / count
        return clipped_surrogate(mean_ratio, mean_ratio.new_zeros(()), advantages / count, low=self.low, high=self.high)
