"""Bootstrap intervals of means, paired differences and ratios, across items and across seeds; a function of the seed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import Literal

import numpy as np

from statewise.stats.hypothesis import Interval, Values, as_pairs, as_vector, check_confidence

CHUNK = 4_000_000  # drawn indices held at once: 32 MB
FEW_VALUES = 16  # so many different rows: their counts are drawn instead of the rows
Method = Literal["percentile", "bca"]


def bootstrap_mean(
    values: Values,
    confidence: float = 0.95,
    *,
    weights: Values | None = None,
    resamples: int = 10_000,
    seed: int = 0,
    method: Method = "bca",
) -> Interval:
    """Interval of the mean (weighted: Σ w x / Σ w) from resampled means. "bca" corrects bias and skewness (Efron 1987).

    (nan, nan) for no value; the value itself where all are equal.
    """
    check_confidence(confidence)
    x = as_vector(values)
    if x.size == 0:
        return Interval(math.nan, math.nan)
    if (x == x[0]).all():
        return Interval(float(x[0]), float(x[0]))
    w = np.ones_like(x) if weights is None else as_vector(weights)
    means = resampled_means(x[None], w, resamples, seed)[:, 0]
    if method == "percentile":
        return interval_of(means, confidence)
    low, high = np.quantile(means, _corrected(confidence, x, w, means))
    return Interval(float(low), float(high))


def bootstrap_difference(
    before: Values,
    after: Values,
    confidence: float = 0.95,
    *,
    weights: Values | None = None,
    resamples: int = 10_000,
    seed: int = 0,
    method: Method = "bca",
) -> Interval:
    """Interval of mean(after) - mean(before), the pairs being resampled as pairs."""
    x, y = as_pairs(before, after)
    return bootstrap_mean(y - x, confidence, weights=weights, resamples=resamples, seed=seed, method=method)


def bootstrap_ratio(
    before: Values, after: Values, confidence: float = 0.95, *, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Percentile interval of mean(after) / mean(before) over resampled pairs; nan where a resampled base is 0."""
    check_confidence(confidence)
    x, y = as_pairs(before, after)
    means = resampled_means(np.stack([x, y]), np.ones_like(x), resamples, seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        return interval_of(means[:, 1] / means[:, 0], confidence)


def bootstrap_seeds(
    groups: Sequence[Values], confidence: float = 0.95, *, crossed: bool, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Percentile interval of the mean over seeds of the mean over items: seeds are resampled, then items.

    groups: one vector a seed, of per-item values (of differences, for a paired comparison).
    crossed: all seeds have the same items in the same order, so one draw of items serves all (Owen 2007); else each drawn
    seed draws its own.
    """
    check_confidence(confidence)
    rows = [as_vector(group) for group in groups]
    if crossed:
        if len({row.size for row in rows}) != 1:
            raise ValueError(f"groups: received sizes {[r.size for r in rows]}; crossed seeds have the same items")
        weights = np.ones(rows[0].size)
        return interval_of(resampled_seeds(np.stack(rows)[None], weights, resamples, seed)[:, 0], confidence)
    own = np.stack([resampled_means(x[None], np.ones_like(x), resamples, seed + i)[:, 0] for i, x in enumerate(rows)])
    random = np.random.default_rng([seed, len(rows)])
    drawn = random.integers(len(rows), size=(len(rows), resamples))
    # A seed drawn twice needs two draws of its items: the second takes the draw of another resample.
    shifts = np.stack([random.permutation(resamples) for _ in rows])
    return interval_of(own[drawn, shifts].mean(0), confidence)


def resampled_means(columns_CN: np.ndarray, weights_N: np.ndarray, resamples: int, seed: int | list[int]) -> np.ndarray:
    """[R, C]: weighted means of the columns over the same redrawn items, R times."""
    random = np.random.default_rng(seed)
    n = weights_N.size
    table = np.vstack([columns_CN * weights_N, weights_N])
    distinct, counts = np.unique(table, axis=1, return_counts=True)
    if distinct.shape[1] <= FEW_VALUES:
        sums = random.multinomial(n, counts / n, size=resamples) @ distinct.T
        return sums[:, :-1] / sums[:, -1:]
    sums = np.concatenate([counts @ table.T for counts in _redrawn(random, resamples, n)])
    return sums[:, :-1] / sums[:, -1:]


def resampled_seeds(
    columns_CSN: np.ndarray, weights_N: np.ndarray, resamples: int, seed: int, stream: int = 0
) -> np.ndarray:
    """[R, C]: means over redrawn seeds of weighted means over redrawn items, one draw of items for all seeds.

    seed names the draws of seeds, (seed, stream) those of items: other items with the same seeds take another stream.
    """
    _, num_seeds, n = columns_CSN.shape
    if num_seeds == 1:
        return resampled_means(columns_CSN[:, 0], weights_N, resamples, [seed, stream])
    even = np.full(num_seeds, 1 / num_seeds)
    shares = np.random.default_rng(seed).multinomial(num_seeds, even, size=resamples) / num_seeds
    parts, start = [], 0
    for counts in _redrawn(np.random.default_rng([seed, stream]), resamples, n):
        weighted, part = counts * weights_N, shares[start : start + len(counts)]
        sums = [((weighted @ column.T) * part).sum(1) for column in columns_CSN]
        parts.append(np.stack(sums, 1) / weighted.sum(1, keepdims=True))
        start += len(counts)
    return np.concatenate(parts)


def _redrawn(random: np.random.Generator, resamples: int, n: int) -> Iterator[np.ndarray]:
    """[size, N] float: how often each of n items is drawn in resample after resample, a chunk at a time."""
    rows = max(1, CHUNK // n)
    for start in range(0, resamples, rows):
        size = min(rows, resamples - start)
        cells = random.integers(n, size=(size, n)) + np.arange(size)[:, None] * n
        yield np.bincount(cells.ravel(), minlength=size * n).reshape(size, n).astype(float)


def interval_of(draws: np.ndarray, confidence: float = 0.95) -> Interval:
    """The central share of resampled values; (nan, nan) where one of them is no number."""
    if draws.size == 0 or not np.isfinite(draws).all():
        return Interval(math.nan, math.nan)
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high))


def sign_p_value(draws: np.ndarray) -> float:
    """Two-sided p-value of resampled values against 0: twice the smaller share on one side, (1 + hits) / (1 + R)."""
    beyond = min(int((draws <= 0).sum()), int((draws >= 0).sum()))
    return min(1.0, 2 * (1 + beyond) / (1 + draws.size))


def _corrected(confidence: float, x: np.ndarray, w: np.ndarray, means: np.ndarray) -> list[float]:
    """Levels Φ(z0 + (z0 + z) / (1 - a (z0 + z))): z0 from the share of means below the mean, a from the skewness."""
    normal = NormalDist()
    levels = [(1 - confidence) / 2, (1 + confidence) / 2]
    mean = float(w @ x / w.sum())
    near = 1e-12 * float(np.abs(x).max())  # sums in another order differ by rounding
    below = ((means < mean - near).mean() + (means <= mean + near).mean()) / 2
    if not 0 < below < 1:
        return levels
    z0 = normal.inv_cdf(float(below))
    gaps = w * (x - mean)
    # Jackknife acceleration: leaving x_i out moves a mean by -w_i (x_i - m) / (Σ w - w_i).
    a = float((gaps**3).sum() / (6 * (gaps**2).sum() ** 1.5))
    shifted = [z0 + normal.inv_cdf(level) for level in levels]
    return [normal.cdf(z0 + z / (1 - a * z)) for z in shifted]
