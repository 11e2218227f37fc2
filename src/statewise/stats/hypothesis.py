"""Standard errors, intervals and paired tests of per-example scores. Plain floats in and out."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

Values = Sequence[float] | np.ndarray


class Interval(NamedTuple):
    low: float
    high: float


def wilson(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Wilson score interval of a proportion: (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n); [0, 1] when n = 0.

    Raises ValueError unless 0 <= successes <= n and 0 < confidence < 1.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes: received {successes} of {n}, expected 0 <= successes <= n")
    if n == 0:
        return Interval(0.0, 1.0)
    z = _normal_quantile(confidence)
    share, shrink = successes / n, 1 + z * z / n
    centre = (share + z * z / (2 * n)) / shrink
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / shrink
    # At 0 and n the bound is exactly 0 or 1; rounding would leave 1e-17.
    return Interval(0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half)


def mean_se(values: Values, weights: Values | None = None) -> tuple[float, float]:
    """Mean and its standard error; (nan, nan) for no value, se nan for one.

    With weights w the ratio estimator: m = Σ w x / Σ w, se = sqrt(n/(n-1) Σ w² (x - m)²) / Σ w, which for equal weights
    is the usual s / sqrt(n).
    """
    x = as_vector(values)
    w = np.ones_like(x) if weights is None else as_vector(weights)
    if w.shape != x.shape or (w < 0).any() or (x.size and w.sum() <= 0):
        raise ValueError(f"weights: received {w.size} for {x.size} values; expected one each, >= 0, not all 0")
    if x.size == 0:
        return math.nan, math.nan
    mean = float(w @ x / w.sum())
    if x.size == 1:
        return mean, math.nan
    scatter = float(((w * (x - mean)) ** 2).sum()) * x.size / (x.size - 1)
    return mean, math.sqrt(scatter) / float(w.sum())


def mean_interval(values: Values, confidence: float = 0.95, *, weights: Values | None = None) -> Interval:
    """Student-t interval of a mean: m ± t(n-1) se; (nan, nan) below two values."""
    mean, se = mean_se(values, weights)
    half = _t_quantile(confidence, len(values) - 1) * se if len(values) > 1 else math.nan
    return Interval(mean - half, mean + half)


def clustered_se(values: Values, clusters: Sequence[Hashable]) -> float:
    """Standard error of the mean where values of one cluster may depend on each other.

    sqrt(G/(G-1) Σ_g (Σ_{i in g} (x_i - m))²) / n over G clusters; nan for one cluster.
    """
    x = as_vector(values)
    if len(clusters) != x.size:
        raise ValueError(f"clusters: received {len(clusters)} for {x.size} values; expected one each")
    _, index = np.unique(np.array([str(c) for c in clusters]), return_inverse=True)
    sums = np.bincount(index, weights=x - x.mean()) if x.size else x
    if sums.size < 2:
        return math.nan
    return math.sqrt(float((sums**2).sum()) * sums.size / (sums.size - 1)) / x.size


def discordant(before: Values, after: Values) -> tuple[int, int]:
    """How many pairs rose and how many fell."""
    x, y = as_pairs(before, after)
    return int((y > x).sum()), int((y < x).sum())


def clustered_ratio(totals: Values, counts: Values) -> tuple[float, float]:
    """Mean of what clusters hold, sum total / sum count, and its standard error, the clusters being the units.

    se = sqrt(G/(G-1) Σ_g (total_g - m count_g)²) / Σ count over G clusters; nan for one cluster.
    """
    x, n = as_pairs(totals, counts)
    mean = float(x.sum() / n.sum())
    if x.size < 2:
        return mean, math.nan
    return mean, math.sqrt(float(((x - mean * n) ** 2).sum()) * x.size / (x.size - 1)) / float(n.sum())


def mcnemar(before: Values, after: Values) -> float:
    """Exact two-sided McNemar p-value of paired binary scores: only the pairs that changed carry information.

    p = min(1, 2 P[X <= min(b, c)]), X ~ Binomial(b + c, 1/2), b gains and c losses. Raises ValueError on other scores.
    """
    x, y = as_pairs(before, after)
    if not (np.isin(x, (0, 1)).all() and np.isin(y, (0, 1)).all()):
        raise ValueError("mcnemar: received scores other than 0 and 1; use paired_t or paired_permutation for those")
    gains, losses = discordant(x, y)
    if gains + losses == 0:
        return 1.0
    from scipy.special import bdtr

    return min(1.0, 2 * float(bdtr(min(gains, losses), gains + losses, 0.5)))


def paired_t(before: Values, after: Values, weights: Values | None = None) -> float:
    """Two-sided p-value of Student's paired t-test; 1 where no pair differs, nan below two pairs. Weights: `mean_se`."""
    x, y = as_pairs(before, after)
    mean, se = mean_se(y - x, weights)
    if x.size < 2:
        return math.nan
    if se == 0:
        return 1.0 if mean == 0 else 0.0
    from scipy.special import stdtr

    return 2 * float(stdtr(x.size - 1, -abs(mean) / se))


def paired_permutation(before: Values, after: Values, *, draws: int = 10_000, seed: int = 0) -> float:
    """Two-sided p-value of the mean difference under random sign flips of each pair; (1 + hits) / (1 + draws).

    Exact (all 2^n flips, hits / 2^n) where that is no more than `draws`.
    """
    x, y = as_pairs(before, after)
    gaps = (y - x)[y != x]
    if 2**gaps.size <= draws:
        signs = 1 - 2 * ((np.arange(2**gaps.size)[:, None] >> np.arange(gaps.size)) & 1)
        extra = 0
    else:
        signs = np.random.default_rng(seed).choice((-1, 1), size=(draws, gaps.size))
        extra = 1
    # Sums that are equal on paper differ by rounding: count those within it.
    hits = int((np.abs(signs @ gaps) >= abs(gaps.sum()) - 1e-9 * np.abs(gaps).sum()).sum())
    return (hits + extra) / (len(signs) + extra)


def holm(p_values: Values) -> list[float]:
    """Holm's step-down adjusted p-values, in the given order: max over ranks j <= i of (m - j) p_(j), capped at 1."""
    p = as_vector(p_values)
    order = np.argsort(p, kind="stable")
    adjusted = np.minimum(1.0, np.maximum.accumulate(p[order] * (p.size - np.arange(p.size))))
    out = np.empty_like(p)
    out[order] = adjusted
    return out.tolist()


def as_vector(values: Values) -> np.ndarray:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1:
        raise ValueError(f"values: received shape {x.shape}, expected one dimension")
    return x


def as_pairs(before: Values, after: Values) -> tuple[np.ndarray, np.ndarray]:
    x, y = as_vector(before), as_vector(after)
    if x.size != y.size:
        raise ValueError(f"pairs: received {x.size} values before and {y.size} after; expected the same items")
    return x, y


def _normal_quantile(confidence: float) -> float:
    check_confidence(confidence)
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _t_quantile(confidence: float, freedom: int) -> float:
    check_confidence(confidence)
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + confidence) / 2))


def check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: received {confidence}, expected a share such as 0.95")
