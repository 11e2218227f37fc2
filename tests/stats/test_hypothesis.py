"""Oracles: scipy, textbook values, and closed forms."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from statewise import stats


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (10, 10), (1, 3), (37, 128), (660, 1319)])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_wilson_is_scipys(successes, n, confidence):
    expected = scipy_stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    assert stats.wilson(successes, n, confidence) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_at_the_edges():
    assert stats.wilson(0, 0) == (0.0, 1.0)
    assert stats.wilson(0, 5).low == 0.0 and stats.wilson(5, 5).high == 1.0
    with pytest.raises(ValueError, match="received 6 of 5"):
        stats.wilson(6, 5)
    with pytest.raises(ValueError, match=r"0\.95"):
        stats.wilson(1, 5, 95)


def test_mean_se():
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    assert stats.mean_se(values) == pytest.approx((0.6, scipy_stats.sem(values)))
    assert stats.mean_se(values, [3.0] * 5) == pytest.approx(stats.mean_se(values))
    assert math.isnan(stats.mean_se([])[0]) and math.isnan(stats.mean_se([1.0])[1])
    with pytest.raises(ValueError, match="weights"):
        stats.mean_se([1.0, 2.0], [1.0])


def test_weighted_standard_error_is_that_of_a_ratio():
    """Simulated: the spread of Σ w x / Σ w over many samples."""
    random = np.random.default_rng(0)
    w = random.integers(1, 20, size=(4000, 50)).astype(float)
    x = 1 / w + random.normal(size=w.shape)
    ratios = (w * x).sum(1) / w.sum(1)
    claimed = np.mean([stats.mean_se(a, b)[1] for a, b in zip(x[:400], w[:400], strict=True)])
    assert claimed == pytest.approx(ratios.std(), rel=0.05)


def test_mean_interval_is_scipys():
    values = np.random.default_rng(1).normal(size=12)
    low, high = scipy_stats.t.interval(0.9, 11, loc=values.mean(), scale=scipy_stats.sem(values))
    assert stats.mean_interval(values, 0.9) == pytest.approx((low, high))
    assert math.isnan(stats.mean_interval([1.0]).low)


def test_clustered_se():
    values = [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert stats.clustered_se(values, list(range(6))) == pytest.approx(stats.mean_se(values)[1])
    # Copies carry no information: three clusters of two equal values are three values.
    assert stats.clustered_se(values, list("aabbcc")) == pytest.approx(stats.mean_se([1.0, 0.0, 1.0])[1])
    assert math.isnan(stats.clustered_se([1.0, 2.0], ["a", "a"]))


def test_mcnemar():
    before, after = [1] * 10 + [0] * 10, [1] * 8 + [0] * 2 + [1] * 9 + [0]
    assert stats.mcnemar(before, after) == pytest.approx(scipy_stats.binomtest(2, 11, 0.5).pvalue)
    assert stats.mcnemar([1, 0], [1, 0]) == 1.0
    assert stats.mcnemar([1, 0], [0, 1]) == 1.0
    with pytest.raises(ValueError, match="0 and 1"):
        stats.mcnemar([0.5], [1])
    with pytest.raises(ValueError, match="2 values before and 1 after"):
        stats.mcnemar([0, 1], [1])


def test_paired_t_is_scipys():
    random = np.random.default_rng(2)
    x, y = random.normal(size=20), random.normal(0.4, size=20)
    assert stats.paired_t(x, y) == pytest.approx(scipy_stats.ttest_rel(x, y).pvalue)
    assert stats.paired_t([1.0, 2.0], [1.0, 2.0]) == 1.0
    assert stats.paired_t([1.0, 2.0], [2.0, 3.0]) == 0.0
    assert math.isnan(stats.paired_t([1.0], [2.0]))


def test_paired_permutation():
    random = np.random.default_rng(3)
    x, y = random.normal(size=9), random.normal(0.7, size=9)
    exact = scipy_stats.permutation_test(
        (x, y), lambda a, b: (b - a).mean(), permutation_type="samples", n_resamples=1000
    )
    assert stats.paired_permutation(x, y) == pytest.approx(exact.pvalue)
    assert stats.paired_permutation(x, y, draws=400, seed=1) == pytest.approx(exact.pvalue, abs=0.08)
    assert stats.paired_permutation(x, x) == 1.0
    assert stats.paired_permutation([0.0] * 4, [0.1] * 4) == pytest.approx(2 / 16)


def test_holm_known_values():
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.9, 0.8]) == [1.0, 1.0]
    assert stats.holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_lies_between_raw_and_bonferroni(p):
    adjusted = stats.holm(p)
    assert all(raw <= a <= min(1, raw * len(p)) + 1e-12 for raw, a in zip(p, adjusted, strict=True))
    in_order = [adjusted[i] for i in np.argsort(p)]
    assert in_order == sorted(in_order)


def test_token_stats_is_reexported():
    from statewise.models.score import token_stats

    assert stats.token_stats is token_stats
    with pytest.raises(AttributeError, match="nothing"):
        _ = stats.nothing
