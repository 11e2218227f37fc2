import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from statewise import stats


@pytest.mark.parametrize("method", ["percentile", "bca"])
def test_agrees_with_scipy(method):
    values = np.random.default_rng(0).exponential(size=60)
    expected = scipy_stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method=method, rng=np.random.default_rng(1)
    ).confidence_interval
    ours = stats.bootstrap_mean(values, resamples=20_000, seed=2, method=method)
    width = expected.high - expected.low
    assert ours.low == pytest.approx(expected.low, abs=0.03 * width)
    assert ours.high == pytest.approx(expected.high, abs=0.03 * width)


def test_bca_leans_to_the_long_tail():
    values = np.random.default_rng(3).exponential(size=40)
    plain, corrected = (stats.bootstrap_mean(values, seed=1, method=m) for m in ("percentile", "bca"))
    assert corrected.low > plain.low and corrected.high > plain.high


def test_is_a_function_of_the_seed_and_not_of_the_chunk(monkeypatch):
    from statewise.stats import bootstrap

    values = np.random.default_rng(4).normal(size=30)
    first = stats.bootstrap_mean(values, seed=5, resamples=500)
    assert stats.bootstrap_mean(values, seed=5, resamples=500) == first
    assert stats.bootstrap_mean(values, seed=6, resamples=500) != first
    monkeypatch.setattr(bootstrap, "CHUNK", 100)
    assert stats.bootstrap_mean(values, seed=5, resamples=500) == pytest.approx(first)


def test_difference_keeps_the_pairs():
    before = np.random.default_rng(7).normal(size=50) * 100
    low, high = stats.bootstrap_difference(before, before + 1)
    assert low == pytest.approx(1) and high == pytest.approx(1)


def test_degenerate_inputs():
    assert stats.bootstrap_mean([2.0, 2.0]) == (2.0, 2.0)
    assert math.isnan(stats.bootstrap_mean([]).low)
