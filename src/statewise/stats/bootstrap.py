"""Bootstrap intervals of a mean and of a paired difference of means; a function of the seed."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Literal

import numpy as np

from statewise.stats.hypothesis import Interval, Values, as_pairs, as_vector, check_confidence

CHUNK = 4_000_000  # drawn indices held at once: 32 MB


def bootstrap_mean(
    values: Values,
    confidence: float = 0.95,
    *,
    resamples: int = 10_000,
    seed: int = 0,
    method: Literal["percentile", "bca"] = "bca",
) -> Interval:
    """Interval of the mean from resampled means. "bca" corrects for bias and skewness (Efron 1987).

    (nan, nan) for no value; the value itself where all are equal.
    """
    check_confidence(confidence)
    x = as_vector(values)
    if x.size == 0:
        return Interval(math.nan, math.nan)
    if (x == x[0]).all():
        return Interval(float(x[0]), float(x[0]))
    means = _resampled_means(x, resamples, seed)
    levels = [(1 - confidence) / 2, (1 + confidence) / 2]
    if method == "bca":
        levels = _corrected(levels, x, means)
    low, high = np.quantile(means, levels)
    return Interval(float(low), float(high))


def bootstrap_difference(
    before: Values,
    after: Values,
    confidence: float = 0.95,
    *,
    resamples: int = 10_000,
    seed: int = 0,
    method: Literal["percentile", "bca"] = "bca",
) -> Interval:
    """Interval of mean(after) - mean(before), the pairs being resampled as pairs."""
    x, y = as_pairs(before, after)
    return bootstrap_mean(y - x, confidence, resamples=resamples, seed=seed, method=method)


def _resampled_means(x: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    rows = max(1, CHUNK // x.size)
    sizes = [min(rows, resamples - start) for start in range(0, resamples, rows)]
    return np.concatenate([x[random.integers(x.size, size=(size, x.size))].mean(1) for size in sizes])


def _corrected(levels: list[float], x: np.ndarray, means: np.ndarray) -> list[float]:
    """Levels Φ(z0 + (z0 + z) / (1 - a (z0 + z))): z0 from the share of means below the mean, a from the skewness."""
    normal = NormalDist()
    below = ((means < x.mean()).mean() + (means <= x.mean()).mean()) / 2
    if not 0 < below < 1:
        return levels
    z0 = normal.inv_cdf(float(below))
    gaps = x - x.mean()
    # Jackknife acceleration of a mean: leaving x_i out moves the mean by -(x_i - m) / (n - 1).
    a = float((gaps**3).sum() / (6 * (gaps**2).sum() ** 1.5))
    shifted = [z0 + normal.inv_cdf(level) for level in levels]
    return [normal.cdf(z0 + z / (1 - a * z)) for z in shifted]
