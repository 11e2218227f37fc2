"""Distances: closed forms, brute force, and the level of the permutation test."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from statewise.drift.distances import (
    Pooled,
    against_null,
    centroid,
    distances,
    jaccard,
    median_bandwidth,
    mmd,
    sliced_wasserstein,
)


def pooled(a: np.ndarray, b: np.ndarray, per_unit: int = 1) -> Pooled:
    """Each `per_unit` rows of a side are a rollout; rollout i of both sides answers prompt i."""
    a, b = (x.reshape(len(x), -1).astype(float) for x in (a, b))
    units = np.concatenate([np.arange(len(a)) // per_unit, 10_000 + np.arange(len(b)) // per_unit])
    strata = np.concatenate([np.arange(len(a)) // per_unit, np.arange(len(b)) // per_unit])
    return Pooled(np.concatenate([a, b]), np.repeat([True, False], [len(a), len(b)]), units, strata)


def truth(p: Pooled) -> np.ndarray:
    return p.is_a.astype(float)[None]


def test_mmd_of_two_points() -> None:
    """Biased: (k(a,a) + k(b,b)) - 2 k(a,b) = 2 - 2 exp(-d^2 / 2h^2)."""
    p = pooled(np.array([[0.0, 0.0]]), np.array([[3.0, 4.0]]))
    for h in (1.0, 5.0):
        assert mmd(p, truth(p), h)[0][0] == pytest.approx(2 - 2 * math.exp(-25 / (2 * h * h)))
    assert median_bandwidth(p) == 5.0


def brute(a: np.ndarray, b: np.ndarray, h: float) -> tuple[float, float]:
    """Gretton 2012, equations 5 and 3, written out."""

    def k(x: np.ndarray, y: np.ndarray) -> float:
        return math.exp(-((x - y) ** 2).sum() / (2 * h * h))

    m, n = len(a), len(b)
    cross = sum(k(x, y) for x in a for y in b) * 2 / (m * n)
    biased = sum(k(x, y) for x in a for y in a) / m**2 + sum(k(x, y) for x in b for y in b) / n**2 - cross
    within = sum(k(a[i], a[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    other = sum(k(b[i], b[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    return biased, within + other - cross


def test_mmd_is_its_definition() -> None:
    random = np.random.default_rng(0)
    a, b = random.normal(size=(7, 3)), random.normal(1.0, size=(5, 3))
    p = pooled(a, b)
    biased, unbiased = mmd(p, truth(p), 1.3)
    assert (biased[0], unbiased[0]) == pytest.approx(brute(a, b, 1.3))
    assert biased[0] != pytest.approx(brute(a, b, 1.3 * math.sqrt(2))[0]), "the factor 2 in the kernel is seen"


def test_mmd_of_gaussians() -> None:
    """Population MMD^2 of N(0, I) and N(m, I): with s = h^2 / (h^2 + 2), 2 s^(d/2) (1 - exp(-|m|^2 / (2 (h^2 + 2))))."""
    d, h, shift, n = 2, 1.0, 1.0, 100
    random = np.random.default_rng(1)
    found = []
    for _ in range(200):
        p = pooled(random.normal(size=(n, d)), random.normal(size=(n, d)) + np.array([shift, 0.0]))
        found.append(mmd(p, truth(p), h)[1][0])
    expected = 2 * (h * h / (h * h + 2)) ** (d / 2) * (1 - math.exp(-(shift**2) / (2 * (h * h + 2))))
    assert np.mean(found) == pytest.approx(expected, abs=4 * np.std(found) / math.sqrt(200))
    assert 4 * np.std(found) / math.sqrt(200) < 0.015


def test_unbiased_is_unbiased_and_biased_is_not() -> None:
    random = np.random.default_rng(2)
    found = []
    for _ in range(300):
        p = pooled(random.normal(size=(10, 2)), random.normal(size=(10, 2)))
        found.append([x[0] for x in mmd(p, truth(p), 1.0)])
    biased, unbiased = np.mean(found, 0)
    assert abs(unbiased) < 0.006 and biased > 0.08


def test_sliced_wasserstein() -> None:
    """A shift by v: W2 along u is |u v|, and the mean of (u v)^2 over directions is |v|^2 / d."""
    random = np.random.default_rng(3)
    a = random.normal(size=(40, 3))
    p = pooled(a, a + np.array([1.0, 2.0, 2.0]))
    assert sliced_wasserstein(p, truth(p), projections=4000)[0] == pytest.approx(3 / math.sqrt(3), rel=0.03)
    line = pooled(a[:, :1], 2 * a[:25, :1])
    # One dimension and W1 beside it: scipy's is W1, so compare W2 with quantiles on a fine grid.
    q = (np.arange(200_000) + 0.5) / 200_000
    x, y = (np.quantile(v, q, method="inverted_cdf") for v in (a[:, 0], 2 * a[:25, 0]))
    assert sliced_wasserstein(line, truth(line), projections=3)[0] == pytest.approx(
        math.sqrt(((x - y) ** 2).mean()), rel=1e-3
    )
    assert scipy_stats.wasserstein_distance(a[:, 0], 2 * a[:25, 0]) <= sliced_wasserstein(line, truth(line))[0]


def test_centroid_and_jaccard() -> None:
    p = pooled(np.array([[0.0, 0.0], [2.0, 0.0]]), np.array([[1.0, 3.0], [1.0, 5.0]]))
    assert centroid(p, truth(p))[0] == 4.0
    words = [frozenset("ab"), frozenset("cd"), frozenset("bc"), frozenset("cd")]
    # Prompt 0: {a, b} and {b, c}: 1 - 1/3. Prompt 1: the same words.
    assert jaccard(words, p, truth(p))[0] == pytest.approx((2 / 3 + 0) / 2)
    assert jaccard([frozenset()] * 4, p, truth(p))[0] == 0.0


def test_permutations_move_whole_rollouts_inside_a_prompt() -> None:
    p = pooled(np.zeros((12, 1)), np.zeros((12, 1)), per_unit=3)
    rows = p.labels(50, seed=0)
    assert (rows[0] == p.is_a).all() and rows.shape == (51, 24)
    for row in rows:
        for stratum in range(4):
            own = row[p.stratum == stratum].reshape(2, 3)
            assert (own == own[:, :1]).all() and own[:, 0].sum() == 1
    assert (p.labels(50, 0) == rows).all() and (p.labels(50, 1) != rows).any()


def null_rate(per_unit: int, moved: bool) -> float:
    """How often p <= 5 % where both sides are one law, states of a rollout being alike."""
    random = np.random.default_rng(4)
    hits = 0
    for trial in range(200):
        sides = [
            np.repeat(random.normal(size=(12, 2)), 4, axis=0) + 0.1 * random.normal(size=(48, 2)) for _ in range(2)
        ]
        p = pooled(*sides, per_unit=per_unit)
        if not moved:  # every state a rollout of its own, all of one prompt
            p = Pooled(p.features, p.is_a, np.arange(96), np.zeros(96))
        hits += against_null(mmd(p, p.labels(99, trial), 1.0)[0]).p_value <= 0.05
    return hits / 200


def test_the_permutation_test_keeps_its_level() -> None:
    """And one that moves single states, as if they were independent, rejects far too often."""
    assert 0.02 <= null_rate(4, moved=True) <= 0.09
    assert null_rate(4, moved=False) > 0.3


def test_it_sees_a_difference() -> None:
    random = np.random.default_rng(5)
    p = pooled(random.normal(size=(60, 2)), random.normal(1.0, size=(60, 2)), per_unit=2)
    found = distances(p, permutations=199)
    assert found["mmd"]["p"] == 0.005 and found["centroid"]["p_value"] == 0.005
    assert found["sliced_wasserstein"]["value"] > found["sliced_wasserstein"]["null_q95"]
    assert [k["bandwidth"] / found["mmd"]["bandwidth"] for k in found["mmd_grid"]] == [0.25, 0.5, 1.0, 2.0, 4.0]
    assert found["states"] == [60, 60]


def test_equal_samples() -> None:
    p = pooled(np.ones((4, 2)), np.ones((4, 2)))
    found = distances(p, permutations=9)
    assert found["mmd"]["mmd2_biased"] == 0.0 and found["mmd"]["p"] == 1.0 and found["centroid"]["value"] == 0.0
