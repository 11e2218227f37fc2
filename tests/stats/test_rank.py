import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from statewise import stats


def test_is_scipys_with_ties() -> None:
    random = np.random.default_rng(0)
    x, y = random.integers(6, size=30), random.integers(6, size=30)
    assert stats.spearman(x, y) == pytest.approx(scipy_stats.spearmanr(x, y).statistic)
    assert stats.spearman([1, 2, 3], [1, 4, 9]) == pytest.approx(1) and math.isnan(stats.spearman([1, 1], [0, 1]))


def test_interval_covers_and_is_seeded() -> None:
    random = np.random.default_rng(1)
    x = random.normal(size=60)
    y = x + random.normal(size=60)
    first = stats.spearman_interval(x, y)
    assert first.low < stats.spearman(x, y) < first.high and 0.15 < first.high - first.low < 0.5
    assert stats.spearman_interval(x, y) == first != stats.spearman_interval(x, y, seed=1)
    expected = scipy_stats.bootstrap(
        (x, y), lambda a, b: scipy_stats.spearmanr(a, b).statistic, paired=True, vectorized=False, n_resamples=2000,
        method="percentile", rng=np.random.default_rng(2),
    ).confidence_interval  # fmt: skip
    assert first == pytest.approx((expected.low, expected.high), abs=0.03)


def test_clusters_are_redrawn_whole() -> None:
    """Copies of a run carry no information: five arms of twenty equal runs are five values."""
    x, y = [1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 1.0, 4.0, 3.0, 5.0]
    copies = [np.repeat(v, 20) for v in (x, y)]
    clusters = np.repeat(list("abcde"), 20).tolist()
    narrow = stats.spearman_interval(*copies)
    wide = stats.spearman_interval(*copies, clusters=clusters)
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)
    assert wide == pytest.approx(stats.spearman_interval(x, y), abs=0.05)


def test_no_interval_without_variation() -> None:
    assert math.isnan(stats.spearman_interval([1, 1, 1], [1, 2, 3]).low) and math.isnan(
        stats.spearman_interval([], []).low
    )
