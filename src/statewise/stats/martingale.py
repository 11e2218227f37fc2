"""Whether tokens were drawn from the distributions that a model gives: phi then has mean 0 and variance V in every state.

With x_t ~ p_t, phi_t = log p_t(x_t) + H[p_t], V_t = sum p (log p + H)^2 and F_t = sum p (log p + H)^4, the sums of phi_t and
of phi_t^2 - V_t are martingales whose steps have the variances V_t and F_t - V_t^2. States may depend on each other in any
way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

# Below this sum of V the normal law of sum phi / sqrt(sum V) is no good: the tests of the module show what it is at 25.
LEAST_VARIANCE = 25.0


@dataclass(frozen=True)
class TokenSums:
    """Over n tokens: sum phi, sum phi^2, sum V, sum (F - V^2)."""

    count: int = 0
    phi: float = 0.0
    square: float = 0.0
    variance: float = 0.0
    square_variance: float = 0.0

    @classmethod
    def of(cls, phi: np.ndarray, variance: np.ndarray, fourth: np.ndarray) -> TokenSums:
        """Of arrays [n]: phi, V and F of each token."""
        x, v, f = (np.asarray(a, np.float64) for a in (phi, variance, fourth))
        return cls(x.size, *(float(values.sum()) for values in (x, x * x, v, f - v * v)))

    def __add__(self, other: TokenSums) -> TokenSums:
        return TokenSums(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class OwnTest:
    """Of H0 "the tokens are the model's own samples".

    z = sum phi / sqrt(sum V), p_mean its two-sided p-value; variance_ratio = sum phi^2 / sum V, p_variance that of
    sum (phi^2 - V) / sqrt(sum (F - V^2)); p = min(1, 2 min(p_mean, p_variance)). All nan where sum V is too small to say.
    detectable: mean phi (nats a token) that p_mean at 5 % finds with a power of 80 %: (1.96 + 0.84) sqrt(sum V) / n.
    """

    z: float
    p_mean: float
    variance_ratio: float
    p_variance: float
    p: float
    detectable: float


def own_test(sums: TokenSums) -> OwnTest:
    if sums.variance < LEAST_VARIANCE:
        return OwnTest(*[math.nan] * 6)
    z = sums.phi / math.sqrt(sums.variance)
    excess = (sums.square - sums.variance) / math.sqrt(sums.square_variance) if sums.square_variance > 0 else 0.0
    p_mean, p_variance = _two_sided(z), _two_sided(excess)
    return OwnTest(
        z=z,
        p_mean=p_mean,
        variance_ratio=sums.square / sums.variance,
        p_variance=p_variance,
        p=min(1.0, 2 * min(p_mean, p_variance)),
        detectable=(1.959964 + 0.841621) * math.sqrt(sums.variance) / sums.count,
    )


def _two_sided(z: float) -> float:
    return math.erfc(abs(z) / math.sqrt(2))
