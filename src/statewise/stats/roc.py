"""How well a number tells two sets apart: area under the ROC curve and deflection, with intervals that know of clusters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from statewise.stats.hypothesis import Values, _normal_quantile, as_vector, check_confidence, wilson

Labels = Sequence[int] | np.ndarray


class Area(NamedTuple):
    """P(x_a > x_b) + P(x_a = x_b) / 2, its standard error and interval."""

    value: float
    se: float
    low: float
    high: float


@dataclass(frozen=True)
class _Placements:
    """Of each value the share of the other set that it lies above (a) or below (b), ties half; sums by cluster."""

    area: float
    sums_a: np.ndarray
    sums_b: np.ndarray
    size_a: int
    size_b: int

    def variance(self) -> float:
        """DeLong's for clusters of one value; Obuchowski's (1997) otherwise: clusters, not values, are independent."""
        return _scatter(self.sums_a, self.size_a) + _scatter(self.sums_b, self.size_b)


def auc(
    a: Values, b: Values, clusters_a: Labels | None = None, clusters_b: Labels | None = None, confidence: float = 0.95
) -> Area:
    """Area under the ROC curve of `a` against `b`; values of one cluster (such as tokens of a text) may depend on each other.

    The interval is normal on the scale log(A / (1 - A)). Where the sets do not overlap it is Wilson's bound for as many
    successes as the smaller set has clusters, which is cautious. Raises ValueError for an empty set.
    """
    check_confidence(confidence)
    placed = _placements(a, b, clusters_a, clusters_b)
    area, se = placed.area, math.sqrt(placed.variance())
    count = min(placed.sums_a.size, placed.sums_b.size)
    if area in (0.0, 1.0):
        low, high = wilson(count if area else 0, count, confidence)
        return Area(area, 0.0, low, high)
    if count < 2:
        return Area(area, math.nan, math.nan, math.nan)
    half = _normal_quantile(confidence) * se / (area * (1 - area))
    middle = math.log(area / (1 - area))
    return Area(area, se, _logistic(middle - half), _logistic(middle + half))


def auc_difference(
    first: tuple[Values, Values],
    second: tuple[Values, Values],
    clusters_a: Labels | None = None,
    clusters_b: Labels | None = None,
    confidence: float = 0.95,
) -> Area:
    """AUC of statistic `first` = (on a, on b) less that of `second` on the same items, paired (DeLong 1988)."""
    x, y = (_placements(*pair, clusters_a, clusters_b) for pair in (first, second))
    gap = x.area - y.area
    variance = _scatter(x.sums_a - y.sums_a, x.size_a) + _scatter(x.sums_b - y.sums_b, x.size_b)
    half = _normal_quantile(confidence) * math.sqrt(variance)
    return Area(gap, math.sqrt(variance), gap - half, gap + half)


def _placements(a: Values, b: Values, clusters_a: Labels | None, clusters_b: Labels | None) -> _Placements:
    x, y = as_vector(a), as_vector(b)
    if not x.size or not y.size:
        raise ValueError(f"auc: received {x.size} and {y.size} values, expected at least one each")
    above = _share_below(x, np.sort(y))
    below = 1 - _share_below(y, np.sort(x))
    area = float(above.mean())
    return _Placements(
        area, _by_cluster(above - area, clusters_a), _by_cluster(below - area, clusters_b), x.size, y.size
    )


def _share_below(x: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.searchsorted(ordered, x, "left") + np.searchsorted(ordered, x, "right")
    return found / (2 * ordered.size)


def _by_cluster(values: np.ndarray, clusters: Labels | None) -> np.ndarray:
    if clusters is None:
        return values
    if len(clusters) != values.size:
        raise ValueError(f"clusters: received {len(clusters)} for {values.size} values; expected one each")
    _, index = np.unique(np.asarray(clusters), return_inverse=True)
    return np.bincount(index, weights=values)


def _scatter(sums: np.ndarray, size: int) -> float:
    count = sums.size
    return float((sums**2).sum()) * count / (count - 1) / size**2 if count > 1 else math.nan


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


@dataclass(frozen=True)
class Sums:
    """n, sum x and sum x^2 of each cluster, arrays [clusters]."""

    count: np.ndarray
    total: np.ndarray
    square: np.ndarray

    @classmethod
    def of(cls, values: Values, clusters: Labels | None = None) -> Sums:
        x = as_vector(values)
        labels = np.arange(x.size) if clusters is None else np.unique(np.asarray(clusters), return_inverse=True)[1]
        return cls(*(np.bincount(labels, weights=w) for w in (np.ones_like(x), x, x * x)))


class Deflection(NamedTuple):
    value: float
    low: float
    high: float


def deflection(a: Sums, b: Sums, confidence: float = 0.95, *, resamples: int = 2000, seed: int = 0) -> Deflection:
    """Signal-to-noise ratio (E_a x - E_b x)^2 / Var_a x, with its interval from resampled clusters (percentiles)."""
    check_confidence(confidence)
    random = np.random.default_rng(seed)
    drawn = np.array([_snr(_resampled(a, random), _resampled(b, random)) for _ in range(resamples)])
    drawn = drawn[np.isfinite(drawn)]
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2]) if drawn.size else (math.nan, math.nan)
    whole = _snr(*(np.array([s.count.sum(), s.total.sum(), s.square.sum()]) for s in (a, b)))
    return Deflection(whole, float(low), float(high))


def _resampled(sums: Sums, random: np.random.Generator) -> np.ndarray:
    size = sums.count.size
    weights = np.bincount(random.integers(size, size=size), minlength=size)
    return np.array([weights @ sums.count, weights @ sums.total, weights @ sums.square])


def _snr(a: np.ndarray, b: np.ndarray) -> float:
    mean_a, mean_b = a[1] / a[0], b[1] / b[0]
    variance = a[2] / a[0] - mean_a**2
    return float((mean_a - mean_b) ** 2 / variance) if variance > 1e-12 * max(1.0, mean_a**2) else math.nan
