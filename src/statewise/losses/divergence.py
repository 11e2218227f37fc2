"""Divergences between two next-token distributions at the same state, named by formula."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from statewise.component import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from statewise.types import Batch, TokenStats


def kl(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v) over the last axis, nats; 0 with zero gradient at equality."""
    log_p, log_q = logits_p.log_softmax(-1), logits_q.log_softmax(-1)
    p = log_p.exp()
    # An impossible token adds nothing; without the guard 0 * (-inf - ...) is NaN.
    return ((log_p - log_q).where(p > 0, 0.0) * p).sum(-1)


class ReferenceKL(Loss, kind="reference_kl"):
    """KL between the policy and the frozen reference at every state, full vocabulary, exact.

    direction "reference_policy": KL(p_ref || p), as ASFT (arXiv 2509.23753) has it; "policy_reference": KL(p || p_ref).
    """

    is_divergence: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("logits",)
    reads: ClassVar[tuple[str, ...]] = ("reference_logits",)

    direction: Literal["reference_policy", "policy_reference"] = "reference_policy"

    @property
    def words(self) -> str:  # type: ignore[override]
        return "KL(p_ref || p)" if self.direction == "reference_policy" else "KL(p || p_ref)"

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        assert stats.logits is not None
        reference = batch.dense["reference_logits"]
        if self.direction == "reference_policy":
            return kl(reference, stats.logits)
        return kl(stats.logits, reference)
