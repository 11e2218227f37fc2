"""Estimators of KL(policy || reference) from the log-probabilities of one sampled token, and where each may be used.

With d = log pi(y | s) - log pi_ref(y | s) and y drawn from pi:

          value                     mean            mean of its gradient, as a loss     as a reward (times grad log pi)
    k1    d                         KL(pi || ref)   0: no effect                        grad KL(pi || ref): right
    k2    d^2 / 2                   biased          grad KL(pi || ref): right           biased
    k3    exp(-d) - 1 + d           KL(pi || ref)   grad KL(ref || pi): another one     biased

So k2 is the loss, k1 the reward, and k1 and k3 are what to log. `reference_kl` needs no estimator: it is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import field_validator

from statewise.component import Loss
from statewise.errors import RecipeError

if TYPE_CHECKING:
    from torch import Tensor

    from statewise.types import Batch, TokenStats

WHY_NOT = {
    "k1": "as a loss its expected gradient is 0, so it has no effect; it is right as a reward, through the advantages",
    "k3": "as a loss its expected gradient is that of KL(reference || policy), not of the KL(policy || reference) it measures",
}


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d: unbiased, of either sign."""
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d^2 / 2: biased as a value; its gradient is that of KL(policy || reference) in expectation."""
    return (logprobs - reference_logprobs).square() / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased, never negative."""
    gap = reference_logprobs - logprobs
    return gap.expm1() - gap


class SampledReferenceKL(Loss, kind="reference_kl_sampled"):
    """stop_grad[r] d^2 / 2 on tokens that the policy wrote: the gradient of KL(policy || reference) in expectation.

    r = pi / behaviour policy weighs tokens of an older policy by importance; it is 1 on fresh ones. Other estimators than
    k2 are refused with the reason.
    """

    needs: ClassVar[tuple[str, ...]] = ("logprobs",)
    reads: ClassVar[tuple[str, ...]] = ("reference_logprobs", "behavior_logprobs")
    words: ClassVar[str] = "stop_grad[r] (log p(y) - log p_ref(y))^2 / 2"

    estimator: str = "k2"

    @field_validator("estimator")
    @classmethod
    def _right_for_a_loss(cls, value: str) -> str:
        if value != "k2":
            reason = WHY_NOT.get(value, "it is unknown")
            raise RecipeError(
                f"objective.loss.estimator: received '{value}': {reason}. Expected 'k2', or the loss 'reference_kl', which "
                "is exact and costs about the same."
            )
        return value

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        ratio = (stats.logprobs - batch.column("behavior_logprobs")).detach().exp()
        return ratio * k2(stats.logprobs, batch.column("reference_logprobs"))

    def monitor(self, stats: TokenStats, batch: Batch) -> dict[str, Tensor]:
        """`reference_k1`, `reference_k3`: unbiased estimates of the KL on fresh tokens."""
        reference = batch.column("reference_logprobs")
        return {"reference_k1": k1(stats.logprobs, reference), "reference_k3": k3(stats.logprobs, reference)}
