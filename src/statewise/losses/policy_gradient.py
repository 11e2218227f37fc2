"""Policy-gradient losses, with the ratio r = pi(y | s) / mu(y | s) to the behaviour policy mu that wrote the rollout.

GRPO, Dr. GRPO and DAPO are `clip` with other bounds, advantages and reductions.
"""

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


def is_clipped(log_ratio: Tensor, advantages: Tensor | float, *, low: float, high: float) -> Tensor:
    """Where the surrogate is at its bound and gives no gradient: r > 1 + high with A > 0, r < 1 - low with A < 0."""
    ratio, sign = log_ratio.exp(), log_ratio.new_tensor(1.0) * advantages
    return ((ratio > 1 + high) & (sign > 0)) | ((ratio < 1 - low) & (sign < 0))


def cispo(logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, *, high: float) -> Tensor:
    """CISPO: -sg[min(r, 1 + high)] A log pi: clipped tokens keep a gradient. Source: arXiv 2506.13585."""
    ratio = (logprobs - behavior_logprobs).exp().clamp(max=1 + high).detach()
    return -ratio * advantages * logprobs


class PolicyGradient(Loss):
    """A loss that is driven by a column of advantages. advantages: the column's name, such as "teacher_advantages"."""

    needs: ClassVar[tuple[str, ...]] = ("logprobs",)

    advantages: str = "advantages"

    def columns_read(self) -> frozenset[str]:
        return super().columns_read() | {self.advantages}


class Reinforce(PolicyGradient, kind="reinforce"):
    """-A log pi: unbiased for one update on fresh rollouts; no correction for older ones."""

    words: ClassVar[str] = "-A log p(y)"

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        return reinforce(stats.logprobs, batch.column(self.advantages))


class Clip(PolicyGradient, kind="clip"):
    """PPO surrogate -min(r A, clip(r) A). `advantage = 1.0` as a constant makes it PSFT on gold tokens."""

    words: ClassVar[str] = "-min(r A, clip(r, 1-low, 1+high) A)"

    low: float = Field(0.2, ge=0, lt=1)
    high: float = Field(0.2, ge=0)
    advantage: float | None = None

    def columns_read(self) -> frozenset[str]:
        driven_by = "gold" if self.advantage is not None else self.advantages
        return frozenset({"behavior_logprobs", driven_by})

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        behavior = batch.column("behavior_logprobs")
        return clipped_surrogate(stats.logprobs, behavior, self._values(batch), low=self.low, high=self.high)

    def monitor(self, stats: TokenStats, batch: Batch) -> dict[str, Tensor]:
        """`clipped_share`: of tokens at the bound."""
        log_ratio = stats.logprobs - batch.column("behavior_logprobs")
        return {"clipped_share": is_clipped(log_ratio, self._values(batch), low=self.low, high=self.high).float()}

    def _values(self, batch: Batch) -> Tensor | float:
        return batch.column(self.advantages) if self.advantage is None else self.advantage


class CISPO(PolicyGradient, kind="cispo"):
    """-sg[min(r, 1 + high)] A log pi."""

    reads: ClassVar[tuple[str, ...]] = ("behavior_logprobs",)
    words: ClassVar[str] = "-stop_grad[min(r, 1+high)] A log p(y)"

    high: float = Field(4.0, ge=0)

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        return cispo(stats.logprobs, batch.column("behavior_logprobs"), batch.column(self.advantages), high=self.high)

    def monitor(self, stats: TokenStats, batch: Batch) -> dict[str, Tensor]:
        """`clipped_share`: of tokens whose ratio is cut."""
        return {"clipped_share": ((stats.logprobs - batch.column("behavior_logprobs")).exp() > 1 + self.high).float()}


class GSPO(PolicyGradient, kind="gspo"):
    """Ratio of whole sequences: s = exp(mean_t log r_t), loss -min(s A, clip(s, 1 - low, 1 + high) A) a sequence.

    A is the mean of the sequence's token advantages. Source: arXiv 2507.18071.
    """

    scope: ClassVar[str] = "sequence"
    reads: ClassVar[tuple[str, ...]] = ("behavior_logprobs",)
    words: ClassVar[str] = "-min(s A, clip(s, 1-low, 1+high) A), s = exp(mean log r) of the sequence"

    low: float = Field(3e-4, ge=0, lt=1)
    high: float = Field(4e-4, ge=0)

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        log_ratio, advantages = self._means(stats, batch)
        return clipped_surrogate(log_ratio, log_ratio.new_zeros(()), advantages, low=self.low, high=self.high)

    def monitor(self, stats: TokenStats, batch: Batch) -> dict[str, Tensor]:
        """`clipped_share`: of sequences at the bound."""
        return {"clipped_share": is_clipped(*self._means(stats, batch), low=self.low, high=self.high).float()}

    def _means(self, stats: TokenStats, batch: Batch) -> tuple[Tensor, Tensor]:
        """log s and A of every sequence, [S]."""
        from statewise.objective import per_sequence

        log_ratio, count = per_sequence(stats.logprobs - batch.column("behavior_logprobs"), batch)
        advantages, _ = per_sequence(batch.column(self.advantages).to(log_ratio.dtype), batch)
        return log_ratio / count.clamp_min(1), advantages / count.clamp_min(1)
