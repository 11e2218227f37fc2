"""Rank correlation with a bootstrap interval."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

from statewise.stats.bootstrap import interval_of
from statewise.stats.hypothesis import Interval, Values, as_pairs


def spearman(x: Values, y: Values) -> float:
    """Spearman's rank correlation, ties at their mean rank; nan where one side is constant or below two values."""
    a, b = as_pairs(x, y)
    return float(_correlation(_ranks(a[None]), _ranks(b[None]))[0]) if a.size > 1 else math.nan


def spearman_interval(
    x: Values,
    y: Values,
    confidence: float = 0.95,
    *,
    clusters: Sequence[Hashable] | None = None,
    resamples: int = 4000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval; with `clusters` (the arm of each run) whole clusters are redrawn.

    Resamples without two different values on each side are left out.
    """
    a, b = as_pairs(x, y)
    random = np.random.default_rng(seed)
    if clusters is None:
        index = list(random.integers(a.size, size=(resamples, a.size))) if a.size else []
    else:
        members = [np.flatnonzero([c == name for c in clusters]) for name in dict.fromkeys(clusters)]
        drawn = random.integers(len(members), size=(resamples, len(members)))
        index = [np.concatenate([members[i] for i in row]) for row in drawn]
    by_size = [np.stack([i for i in index if i.size == size]) for size in sorted({i.size for i in index})]
    values = np.concatenate([_correlation(_ranks(a[i]), _ranks(b[i])) for i in by_size]) if by_size else a[:0]
    kept = values[np.isfinite(values)]
    return interval_of(kept, confidence) if kept.size > resamples / 2 else Interval(math.nan, math.nan)


def _ranks(rows: np.ndarray) -> np.ndarray:
    from scipy.stats import rankdata

    return rankdata(rows, axis=-1)


def _correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
