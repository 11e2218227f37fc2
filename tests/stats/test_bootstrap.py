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


def test_few_distinct_values_are_drawn_by_their_counts(monkeypatch):
    """Two ways to the same law: counts of distinct pairs, and indices."""
    from statewise.stats import bootstrap

    before, after = [0] * 50 + [1] * 50, [0] * 40 + [1] * 60
    by_counts = stats.bootstrap_ratio(before, after)
    monkeypatch.setattr(bootstrap, "FEW_VALUES", 0)
    assert by_counts == pytest.approx(stats.bootstrap_ratio(before, after), abs=0.01)
    assert by_counts.low < 1.2 < by_counts.high


def test_ratio_is_scipys():
    random = np.random.default_rng(8)
    x = random.uniform(1, 2, size=80)
    y = x * random.uniform(0.5, 1.5, size=80)
    expected = scipy_stats.bootstrap(
        (x, y),
        lambda a, b, axis: b.mean(axis) / a.mean(axis),
        paired=True,
        method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert stats.bootstrap_ratio(x, y) == pytest.approx((expected.low, expected.high), abs=0.005)
    assert math.isnan(stats.bootstrap_ratio([0, 0, 0, 1], [1, 1, 0, 1]).low)


def test_weights_are_those_of_a_ratio():
    random = np.random.default_rng(9)
    x, w = random.exponential(size=200), random.integers(1, 30, size=200).astype(float)
    low, high = stats.bootstrap_mean(x, weights=w)
    plain = stats.mean_interval(x, weights=w)
    assert (low, high) == pytest.approx(plain, abs=0.04)
    assert stats.bootstrap_mean(x, weights=np.full(200, 3.0)) == pytest.approx(stats.bootstrap_mean(x), abs=0.02)


@pytest.mark.parametrize("crossed", [True, False])
def test_seeds_then_items(crossed):
    """The spread is that of both levels: var = var(seed) / S + var(item) / N, items counted once where they are shared."""
    random = np.random.default_rng(10)
    num_seeds, n = 12, 300
    by_seed = random.normal(scale=0.2, size=(num_seeds, 1))
    items = random.normal(size=(1 if crossed else num_seeds, n))
    values = by_seed + items
    low, high = stats.bootstrap_seeds(list(values), crossed=crossed)
    spread = (high - low) / 2 / 1.96
    item_part = items.var() / n if crossed else items.var() / (n * num_seeds)
    expected = math.sqrt(values.mean(1).var() / num_seeds + item_part)
    assert spread == pytest.approx(expected, rel=0.12)
    assert low < values.mean() < high


def test_coverage_of_the_crossed_bootstrap():
    """Five seeds and 100 shared items: a 95 % interval holds the truth nearly as often as it says."""
    random = np.random.default_rng(11)
    hits = 0
    for trial in range(200):
        gaps = 0.1 + random.normal(scale=0.05, size=(5, 1)) + random.normal(scale=0.5, size=(1, 100))
        gaps = gaps + random.normal(scale=0.3, size=(5, 100))
        low, high = stats.bootstrap_seeds(list(gaps), crossed=True, resamples=400, seed=trial)
        hits += low <= 0.1 <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_crossed_seeds_have_the_same_items():
    with pytest.raises(ValueError, match=r"sizes \[2, 3\]"):
        stats.bootstrap_seeds([[1, 2], [1, 2, 3]], crossed=True)


def test_sign_p_value():
    from statewise.stats.bootstrap import sign_p_value

    assert sign_p_value(np.arange(-10, 990) + 0.5) == pytest.approx(2 * 11 / 1001)
    assert sign_p_value(np.zeros(10)) == 1.0 and sign_p_value(np.ones(999)) == 0.002
