"""Closed forms of the numbers made of singular values and angles; each is shown to miss when its formula is bent."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statewise.stats import spectra


def orthogonal(n: int, seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))[0]


def values(matrix: np.ndarray) -> np.ndarray:
    return np.linalg.svd(matrix, compute_uv=False)


@pytest.mark.parametrize(("factor", "shift"), [(1.01, 0.01), (0.5, 0.5), (-1.0, 0.0)])
def test_shift_of_a_multiple(factor: float, shift: float) -> None:
    w = np.random.default_rng(0).standard_normal((40, 60))
    assert spectra.spectral_shift(values(w), values(factor * w)) == pytest.approx(shift, abs=1e-14)


def test_shift_of_one_singular_value() -> None:
    """Raising one by d gives d / ‖s‖: 5.02403e-3 for d = 0.3 and ‖s‖ = 59.7130."""
    s = np.random.default_rng(1).random(64) * 10 + 1
    s *= 0.3 / 5.02403e-3 / np.linalg.norm(s)
    after = s.copy()
    after[7] += 0.3
    assert spectra.spectral_shift(s, after) == pytest.approx(5.02403e-3, rel=1e-12)
    assert np.abs(after - s).sum() / s.sum() != pytest.approx(5.02403e-3, rel=1e-3)  # an L1 norm would


def test_weyl_mirsky_and_the_drift_ratio() -> None:
    random = np.random.default_rng(2)
    w, d = random.standard_normal((120, 200)), 0.01 * random.standard_normal((120, 200))
    s, t, own = values(w), values(w + d), values(d)
    assert np.abs(t - s).max() <= own[0]
    assert np.linalg.norm(t - s) <= np.linalg.norm(d)
    assert 0 <= spectra.drift_ratio(s, t, float(np.linalg.norm(d))) <= 1
    assert spectra.spectral_shift(s, t) <= np.linalg.norm(d) / np.linalg.norm(w)


def test_flat_spectrum_has_every_rank_equal() -> None:
    s = np.full(7, 3.0)
    for number in (
        spectra.stable_rank(s),
        spectra.effective_rank(s, 1),
        spectra.effective_rank(s, 2),
        spectra.participation(s, 1),
        spectra.participation(s, 2),
    ):
        assert number == pytest.approx(7)


def test_geometric_spectrum() -> None:
    """σ_i = 1/2^i: stable rank 4/3, participation 5/3 (energy) and 3 (σ), effective rank 4 (σ) and 2.116535 (energy)."""
    s = 0.5 ** np.arange(60)
    assert spectra.stable_rank(s) == pytest.approx(4 / 3)
    assert spectra.participation(s, 2) == pytest.approx(5 / 3)
    assert spectra.participation(s, 1) == pytest.approx(3)
    assert spectra.effective_rank(s, 1) == pytest.approx(4)
    assert spectra.effective_rank(s, 2) == pytest.approx(2.116535, abs=1e-6)


def test_gaussian_stable_rank() -> None:
    w = np.random.default_rng(3).standard_normal((400, 1200))
    assert spectra.stable_rank(values(w)) == pytest.approx(400 * 1200 / (20 + 1200**0.5) ** 2, rel=0.04)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0.1, 100), min_size=4, max_size=30), st.floats(1e-3, 1e3))
def test_scale_invariance(drawn: list[float], c: float) -> None:
    s = np.sort(np.array(drawn))[::-1]
    assert spectra.stable_rank(c * s) == pytest.approx(spectra.stable_rank(s))
    assert spectra.effective_rank(c * s, 1) == pytest.approx(spectra.effective_rank(s, 1))
    if s[0] > 1.001 * s[3]:
        assert spectra.hill(c * s, 4) == pytest.approx(spectra.hill(s, 4))
        assert spectra.hill(s**2, 4) == pytest.approx(spectra.hill(s, 4) / 2)


@pytest.mark.parametrize(("k", "expected"), [(10, 2.272315), (64, 2.065563), (512, 2.011963)])
def test_hill_of_a_power_law(k: int, expected: float) -> None:
    """σ_i = (i/N)^(-1/2): alpha (k-1) / [(k-1) ln k - ln (k-1)!]."""
    s = (np.arange(1, 2001) / 2000.0) ** -0.5
    assert spectra.hill(s, k) == pytest.approx(expected, abs=1e-6)
    with_k_terms = k / np.log(s[:k] / s[k - 1]).sum()  # a mean over k instead of k - 1 terms
    assert with_k_terms != pytest.approx(expected, rel=1e-3)


def test_hill_of_pareto_samples() -> None:
    """Mean alpha (k-1)/(k-2) and spread alpha (k-1)/((k-2) sqrt(k-3)): 2.540 ± .325 at alpha = 2.5, k = 64."""
    random = np.random.default_rng(4)
    found = [spectra.hill(np.sort(random.pareto(2.5, 2000) + 1)[::-1], 64) for _ in range(400)]
    assert np.mean(found) == pytest.approx(2.540, abs=0.06)
    assert np.std(found) == pytest.approx(0.325, abs=0.04)


def test_hill_refuses_a_k_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="k is 5, expected 2 to 3"):
        spectra.hill(np.array([3.0, 2.0, 1.0]), 5)
    assert spectra.hill_curve(np.array([4.0, 2.0, 1.0]), [2, 5])[1:] == [pytest.approx(math.nan, nan_ok=True)]


@pytest.mark.parametrize(("degrees", "expected"), [(30.0, 0.75), (60.0, 0.25)])
def test_similarity_of_equal_angles(degrees: float, expected: float) -> None:
    basis = orthogonal(40, 5)
    a, beside = basis[:, :8], basis[:, 8:16]
    theta = math.radians(degrees)
    b = math.cos(theta) * a + math.sin(theta) * beside
    assert spectra.subspace_similarity(a, b) == pytest.approx(expected)
    turned = b @ orthogonal(8, 6)
    assert spectra.subspace_similarity(-a, turned) == pytest.approx(expected)
    assert float(np.abs(a.T @ b).sum() / 8) != pytest.approx(expected, rel=0.05)  # cosines without the square


def test_similarity_of_random_subspaces() -> None:
    """K / n = 16 / 200 = .08, with a spread of .007."""
    found = [
        spectra.subspace_similarity(orthogonal(200, s)[:, :16], orthogonal(200, s + 99)[:, :16]) for s in range(20)
    ]
    assert np.mean(found) == pytest.approx(0.08, abs=0.006)
    assert np.std(found) == pytest.approx(0.007, abs=0.004)


@pytest.mark.parametrize("degrees", [1e-3, 0.5, 5.0, 30.0, 60.0, 89.0])
def test_known_angles(degrees: float) -> None:
    basis = orthogonal(120, 7)
    a, beside = basis[:, :32], basis[:, 32:64]
    theta = math.radians(degrees)
    b = (math.cos(theta) * a + math.sin(theta) * beside) @ orthogonal(32, 8)
    assert spectra.principal_angles(a, b) == pytest.approx(np.full(32, degrees), abs=1e-8)
    assert spectra.principal_angles(a, a @ orthogonal(32, 9)) == pytest.approx(np.zeros(32), abs=1e-9)


def test_arccos_in_float32_would_not_do() -> None:
    """What the sine form is for: at 1e-3 degrees the cosine form in float32 is off by more than the angle."""
    basis = orthogonal(120, 7)
    theta = math.radians(1e-3)
    a = basis[:, :32]
    b = math.cos(theta) * a + math.sin(theta) * basis[:, 32:64]
    cosines = np.linalg.svd(a.astype(np.float32).T @ b.astype(np.float32), compute_uv=False)
    wrong = np.degrees(np.arccos(np.minimum(cosines, 1)))
    assert np.abs(wrong - 1e-3).max() > 1e-3
    assert np.abs(spectra.principal_angles(a, b) / 1e-3 - 1).max() < 0.01


def test_mixed_angles_above_and_below_45_degrees() -> None:
    basis = orthogonal(60, 10)
    degrees = np.array([80.0, 50.0, 20.0, 0.01])
    b = basis[:, :4] * np.cos(np.radians(degrees)) + basis[:, 4:8] * np.sin(np.radians(degrees))
    assert spectra.principal_angles(basis[:, :4], b) == pytest.approx(degrees, abs=1e-7)


def test_gap_aware_k() -> None:
    s = np.array([10.0, 9.0, 8.0, 4.0, 3.99, 3.98, 3.97])
    assert spectra.widest_gap(s, 2, 6) == 3
    assert spectra.relative_gap(s, 3) == pytest.approx(0.5)
    assert spectra.relative_gap(s, 7) == 1
    summary = spectra.angle_summary(np.arange(11.0))
    assert summary == {"max": 10, "mean": 5, "median": 5, "p90": 9}


def test_nothing_to_measure() -> None:
    zero = np.zeros(3)
    assert math.isnan(spectra.stable_rank(zero)) and math.isnan(spectra.effective_rank(zero, 1))
    assert math.isnan(spectra.hill(zero, 2)) and math.isnan(spectra.shift_floor(zero))
