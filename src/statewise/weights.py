"""Token weights: pure functions `(logprobs, entropy, ...) -> weight`, and the components that recipes name.

All arguments are detached float tensors of any one shape; logprobs = log p(y_t | s_t) and entropies in nats. A weight
multiplies the token's loss and is evaluated under no_grad, so d(w * nll)/dlogits = w (p - e_y) whatever w depends on.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from statewise.component import Weight
from statewise.errors import RecipeError

if TYPE_CHECKING:
    from torch import Tensor

    from statewise.types import Batch, TokenStats


def probability(logprobs: Tensor) -> Tensor:
    """DFT: w = p. Source: arXiv 2508.05629."""
    return logprobs.exp()


def cll_gamma(
    logprobs: Tensor,
    entropy: Tensor,
    *,
    beta: float = 1.0,
    gamma_min: float = 0.1,
    gamma_max: float = 2.0,
    phi_clip: float | None = None,
    strength: float = 1.0,
) -> Tensor:
    """Exponent of IDFT: gamma = 1 + strength (clip(exp(-phi / beta), gamma_min, gamma_max) - 1), phi = log p + H.

    phi_clip: bound B with phi clipped to [-B, B] before the exponential (None: not clipped).
    strength: lambda of the schedule; 0 gives gamma = 1, which is DFT.
    The clip is done on the exponent, so phi = -1e4 can't overflow. Source: arXiv 2602.12222.
    """
    phi = logprobs + entropy
    if phi_clip is not None:
        phi = phi.clamp(-phi_clip, phi_clip)
    low = math.log(gamma_min) if gamma_min > 0 else -math.inf
    high = math.log(gamma_max) if gamma_max > 0 else -math.inf
    gamma = (-phi / beta).clamp(low, high).clamp(max=80.0).exp()
    return 1 + strength * (gamma - 1)


def cll(
    logprobs: Tensor,
    entropy: Tensor,
    *,
    beta: float = 1.0,
    gamma_min: float = 0.1,
    gamma_max: float = 2.0,
    phi_clip: float | None = None,
    strength: float = 1.0,
) -> Tensor:
    """IDFT: w = p^gamma = exp(gamma log p), see `cll_gamma`. gamma_min = gamma_max = 0 is SFT, = 1 is DFT.

    Source: arXiv 2602.12222; the whole power is detached (the later code), so the target is always pushed up.
    """
    gamma = cll_gamma(
        logprobs,
        entropy,
        beta=beta,
        gamma_min=gamma_min,
        gamma_max=gamma_max,
        phi_clip=phi_clip,
        strength=strength,
    )
    # p = 0 with gamma = 0 is weight 1 (SFT), not 0 * inf.
    return (gamma * logprobs.clamp_min(-1e30)).exp()


def phi_mask(logprobs: Tensor, entropy: Tensor, *, bound: float = 5.0) -> Tensor:
    """w = 1 where |log p + H| < bound (nats), else 0: tokens far from the policy are not trained. Source: arXiv 2602.12222."""
    return ((logprobs + entropy).abs() < bound).to(logprobs.dtype)


def top_entropy(logits: Tensor, *, k: int = 20, alpha: float = 1.0) -> Tensor:
    """EAFT: w = (H_k / ln k)^alpha, H_k the entropy of the renormalised top-k of logits [..., V]. Source: arXiv 2601.02151."""
    k = min(k, logits.shape[-1])
    log_q = logits.topk(k, dim=-1).values.log_softmax(-1)
    entropy = -(log_q.exp() * log_q).sum(-1)
    return (entropy.clamp_min(0) / math.log(k)) ** alpha


def entropy(entropy: Tensor, *, num_tokens: int) -> Tensor:
    """EAFT as run in arXiv 2602.12222: w = H / ln V over the full vocabulary of V = num_tokens ids."""
    return entropy.clamp_min(0) / math.log(num_tokens)


def talr(logprobs: Tensor, tau: Tensor, *, floor: float = 0.01) -> Tensor:
    """TALR: w = max(p^(1/tau), floor), tau = the step's median of per-sequence mean NLL (nats). Source: arXiv 2509.20758."""
    return (logprobs / tau.clamp_min(1e-6)).exp().clamp_min(floor)


def importance(logprobs: Tensor, reference_logprobs: Tensor, *, low: float = 0.2, high: float = 1.8) -> Tensor:
    """iw-SFT, token mode: w = clip(p / p_ref, low, high). Source: arXiv 2507.12856."""
    return (logprobs - reference_logprobs).clamp(max=80.0).exp().clamp(low, high)


def importance_sequence(mean_log_ratio: Tensor, *, temperature: float = 2.0, high: float = 16.0) -> Tensor:
    """iw-SFT, sequence mode: w = min(exp(T mean_t(log p - log p_ref)), high). Source: arXiv 2507.12856."""
    return (temperature * mean_log_ratio).clamp(max=80.0).exp().clamp(max=high)


class Probability(Weight, kind="probability"):
    """DFT: w = p."""

    needs: ClassVar[tuple[str, ...]] = ("logprobs",)
    words: ClassVar[str] = "p(y)"

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        return probability(stats.logprobs)


class CLL(Weight, kind="cll"):
    """IDFT: w = p^gamma, gamma = clip(exp(-(log p + H) / beta), gamma_min, gamma_max).

    phi_mask: tokens with |phi| of at least so many nats get 0 (None: all are trained), see `PhiMask`.
    lambda_warmup, lambda_transition: shares of the budget with strength 0 (DFT), then linear up to 1; a function of the
    run's progress alone, so that a resumed run continues it.
    """

    needs: ClassVar[tuple[str, ...]] = ("logprobs", "entropy")
    words: ClassVar[str] = "p(y)^gamma, gamma = clip(exp(-(log p + H)/beta))"

    beta: float = Field(1.0, gt=0)
    gamma_min: float = Field(0.1, ge=0)
    gamma_max: float = Field(2.0, ge=0)
    phi_clip: float | None = Field(None, gt=0)
    phi_mask: float | None = Field(None, gt=0)
    lambda_warmup: float = Field(0.0, ge=0, le=1)
    lambda_transition: float = Field(0.0, ge=0, le=1)

    def model_post_init(self, context: object) -> None:
        if self.gamma_min > self.gamma_max:
            raise RecipeError(f"weight.cll: gamma_min = {self.gamma_min} is above gamma_max = {self.gamma_max}.")

    def strength(self, progress: float) -> float:
        """lambda at `progress` in [0, 1]."""
        if progress < self.lambda_warmup:
            return 0.0
        if self.lambda_transition == 0:
            return 1.0
        return min(1.0, (progress - self.lambda_warmup) / self.lambda_transition)

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        assert stats.entropy is not None
        value = cll(
            stats.logprobs,
            stats.entropy,
            beta=self.beta,
            gamma_min=self.gamma_min,
            gamma_max=self.gamma_max,
            phi_clip=self.phi_clip,
            strength=self.strength(batch.progress),
        )
        return value if self.phi_mask is None else value * phi_mask(stats.logprobs, stats.entropy, bound=self.phi_mask)

    def monitor(self, stats: TokenStats, batch: Batch) -> dict[str, Tensor]:
        """Shares of tokens whose exponent sits on a clip bound."""
        assert stats.entropy is not None
        raw = cll_gamma(stats.logprobs, stats.entropy, beta=self.beta, gamma_min=0.0, gamma_max=math.inf)
        return {"gamma_at_min": (raw <= self.gamma_min).float(), "gamma_at_max": (raw >= self.gamma_max).float()}


class PhiMask(Weight, kind="phi_mask"):
    """Only tokens with |phi| < bound (nats), phi = log p + H under the policy as it is then."""

    needs: ClassVar[tuple[str, ...]] = ("logprobs", "entropy")
    words: ClassVar[str] = "1[|log p + H| < bound]"

    bound: float = Field(5.0, gt=0)

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        assert stats.entropy is not None
        return phi_mask(stats.logprobs, stats.entropy, bound=self.bound)

    def monitor(self, stats: TokenStats, batch: Batch) -> dict[str, Tensor]:
        """Share of tokens that are left out."""
        return {"masked": 1 - self(stats, batch)}


class TopEntropy(Weight, kind="top_entropy"):
    """EAFT, official: entropy of the renormalised top-k over ln k (k = 20), to the power alpha."""

    needs: ClassVar[tuple[str, ...]] = ("logits",)
    words: ClassVar[str] = "H(top-k)/ln k"

    k: int = Field(20, ge=2)
    alpha: float = Field(1.0, gt=0)

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        assert stats.logits is not None
        return top_entropy(stats.logits, k=self.k, alpha=self.alpha)


class Entropy(Weight, kind="entropy"):
    """EAFT as run in the IDFT paper: H / ln V over the full vocabulary (about 4x smaller weights than `top_entropy`)."""

    needs: ClassVar[tuple[str, ...]] = ("entropy", "logits")
    words: ClassVar[str] = "H/ln V"

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        assert stats.entropy is not None and stats.logits is not None
        return entropy(stats.entropy, num_tokens=stats.logits.shape[-1])


class TALR(Weight, kind="talr"):
    """TALR: max(p^(1/tau), floor); tau is written by the `behavior` signal."""

    needs: ClassVar[tuple[str, ...]] = ("logprobs",)
    reads: ClassVar[tuple[str, ...]] = ("median_nll",)
    words: ClassVar[str] = "max(p^(1/tau), floor)"

    floor: float = Field(0.01, ge=0, le=1)

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        return talr(stats.logprobs, batch.column("median_nll"), floor=self.floor)


class Importance(Weight, kind="importance"):
    """iw-SFT: clip(p / p_ref, low, high) a token."""

    needs: ClassVar[tuple[str, ...]] = ("logprobs",)
    reads: ClassVar[tuple[str, ...]] = ("reference_logprobs",)
    words: ClassVar[str] = "clip(p/p_ref)"

    low: float = Field(0.2, ge=0)
    high: float = Field(1.8, gt=0)

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        return importance(stats.logprobs, batch.column("reference_logprobs"), low=self.low, high=self.high)


class ImportanceSequence(Weight, kind="importance_sequence"):
    """iw-SFT, sequence mode: min(exp(T mean log(p / p_ref)), high), one value a sequence."""

    scope: ClassVar[str] = "sequence"
    needs: ClassVar[tuple[str, ...]] = ("logprobs",)
    reads: ClassVar[tuple[str, ...]] = ("reference_logprobs",)
    words: ClassVar[str] = "min(exp(T mean log(p/p_ref)), high)"

    temperature: float = Field(2.0, gt=0)
    high: float = Field(16.0, gt=0)

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        from statewise.objective import per_sequence, spread

        ratio = stats.logprobs - batch.column("reference_logprobs")
        total, count = per_sequence(ratio, batch)
        value = importance_sequence(total / count.clamp_min(1), temperature=self.temperature, high=self.high)
        return spread(value, batch)
