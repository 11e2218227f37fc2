"""Exact and leading decompositions against LAPACK's, their floors, and the certificate."""

import math

import numpy as np
import pytest
import torch

from statewise.geometry import krylov
from statewise.geometry.checkpoints import LowRank, Weights
from statewise.geometry.spectrum import decompose, factored, singular_values, update_values
from statewise.stats.spectra import effective_rank, hill, shift_floor, spectral_shift, subspace_similarity


def power_law(n: int, seed: int = 0) -> torch.Tensor:
    """A matrix like trained weights: power-law head, shrinking bulk, hard edge."""
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0] for _ in range(2))
    i = torch.arange(1, n + 1, dtype=torch.float64)
    s = 4 * i**-0.7 + torch.sqrt(1 - (i - 1) / n) * 0.8
    return (u * s) @ v.T


def update(n: int, seed: int = 1) -> torch.Tensor:
    """Rank-24 power law and noise of equal energy, as in the reference measurement."""
    generator = torch.Generator().manual_seed(seed)
    low = (
        torch.randn(n, 24, generator=generator) * torch.arange(1, 25) ** -0.5 @ torch.randn(24, n, generator=generator)
    )
    noise = torch.randn(n, n, generator=generator)
    return low / low.norm() + noise / noise.norm()


@pytest.mark.parametrize("shape", [(48, 80), (80, 48), (100, 100), (300, 150), (150, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decomposition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    w = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = decompose(Weights(w), 20)
    u, s, vt = np.linalg.svd(w.double().numpy(), full_matrices=False)
    assert found.s == pytest.approx(s, rel=1e-10)
    for ours, theirs in ((found.u, u[:, :20]), (found.v, vt[:20].T)):
        assert np.abs(ours.T @ ours - np.eye(20)).max() < 1e-10
        assert np.abs(np.abs((ours * theirs).sum(axis=0)) - 1).max() < 1e-8
    assert found.u * found.s[:20] == pytest.approx(w.double().numpy() @ found.v, abs=1e-9)


def test_adapter_is_decomposed_as_the_sum() -> None:
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(90, 70, generator=generator).bfloat16()
    delta = LowRank(*(torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((90, 4), (4, 70))))
    exact = np.linalg.svd(w.double().numpy() + (delta.left @ delta.right).numpy(), compute_uv=False)
    assert singular_values(Weights(w, delta)) == pytest.approx(exact, rel=1e-10)
    core = factored(delta)
    assert core.s[:4] == pytest.approx(np.linalg.svd((delta.left @ delta.right).numpy(), compute_uv=False)[:4])
    assert np.count_nonzero(core.s) == 4 and len(core.s) == 70
    assert (core.u * core.s[:4]) @ core.v.T == pytest.approx((delta.left @ delta.right).numpy())


def test_rank_deficient_matrix_keeps_what_can_be_relied_on() -> None:
    generator = torch.Generator().manual_seed(2)
    w = torch.randn(80, 5, generator=generator) @ torch.randn(5, 90, generator=generator)
    found = decompose(Weights(w.double()), 20)
    assert found.k == 5 and np.abs(found.u.T @ found.u - np.eye(5)).max() < 1e-10
    assert decompose(Weights(torch.zeros(70, 70)), 4).k == 0


def test_nan_is_refused() -> None:
    w = torch.ones(80, 80)
    w[3, 4] = math.nan
    with pytest.raises(ArithmeticError, match="NaN"):
        singular_values(Weights(w))


@pytest.mark.parametrize("shape", [(256, 256), (256, 400), (400, 256)])
def test_values_of_an_update_in_float32(shape: tuple[int, int]) -> None:
    delta = update(400)[: shape[0], : shape[1]].contiguous()
    exact, found = singular_values(Weights(delta)), update_values(delta)
    assert not np.array_equal(exact, found) and np.linalg.norm(found - exact) < 1e-5 * np.linalg.norm(exact)
    for number in (lambda s: effective_rank(s, 1), lambda s: effective_rank(s, 2), lambda s: hill(s, 128)):
        assert number(found) == pytest.approx(number(exact), rel=1e-5)


def test_an_update_that_float32_would_blur_is_taken_exactly() -> None:
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(200, 1, generator=generator) @ torch.randn(1, 200, generator=generator)
    delta = 1e4 * direction / direction.norm() + torch.randn(200, 200, generator=generator) / 200
    assert np.array_equal(update_values(delta), singular_values(Weights(delta)))


def test_floor_of_the_shift() -> None:
    """NSS of a permuted matrix is 0: below 1e-13 exactly, while singular values in float32 have a floor near 1e-6."""
    w = power_law(512).bfloat16()
    random = torch.Generator().manual_seed(3)
    permuted = w[torch.randperm(512, generator=random)][:, torch.randperm(512, generator=random)]
    before, after = singular_values(Weights(w)), singular_values(Weights(permuted))
    measured = spectral_shift(before, after)
    assert measured < 1e-13 and measured <= shift_floor(before) < 1e-9
    single = [torch.linalg.svdvals(x.float()).double().numpy() for x in (w, permuted)]
    assert spectral_shift(*single) > 1e-7
    gram = [torch.linalg.eigvalsh(x.float() @ x.float().T).clamp_min(0).sqrt().double().numpy() for x in (w, permuted)]
    assert spectral_shift(*gram) > 1e-7


def test_shift_is_invariant_under_rotations() -> None:
    w = torch.randn(60, 60, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    q, r = (torch.linalg.qr(torch.randn(60, 60, dtype=torch.float64))[0] for _ in range(2))
    before = singular_values(Weights(w))
    assert spectral_shift(before, singular_values(Weights(q @ w @ r))) < 1e-14
    assert spectral_shift(before, singular_values(Weights(1.01 * w))) == pytest.approx(0.01, abs=1e-12)


@pytest.fixture(scope="module")
def exact() -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    d = update(512)
    _, s, vt = np.linalg.svd(d.double().numpy())
    return d, s, vt[:16].T


def test_krylov_is_certified_and_right(exact: tuple[torch.Tensor, np.ndarray, np.ndarray]) -> None:
    d, s, v = exact
    found = krylov.leading(d, 16)
    assert found.certified and found.residual < 1e-4
    assert found.s == pytest.approx(s[:16], rel=1e-5)
    assert subspace_similarity(v, found.v.astype(np.float64)) > 1 - 1e-5
    assert found.gap == pytest.approx(1 - s[16] / s[15], rel=1e-2)
    again = krylov.residual(d, torch.from_numpy(found.u), torch.from_numpy(found.s).float(), torch.from_numpy(found.v))
    assert again < 1e-4


def test_the_default_sketch_fails_the_certificate(exact: tuple[torch.Tensor, np.ndarray, np.ndarray]) -> None:
    d, s, v = exact
    torch.manual_seed(0)
    u, values, right = torch.svd_lowrank(d, q=16, niter=2)
    assert krylov.residual(d, u, values, right) > krylov.RESIDUAL
    assert abs(float(values[15]) / s[15] - 1) > 0.01
    assert subspace_similarity(v, right.double().numpy()) < 0.95


def test_too_few_blocks_are_not_certified(exact: tuple[torch.Tensor, np.ndarray, np.ndarray]) -> None:
    assert not krylov.leading(exact[0], 16, max_blocks=2).certified


def test_small_zero_and_repeated() -> None:
    small = torch.randn(30, 50, generator=torch.Generator().manual_seed(5))
    found = krylov.leading(small, 16)
    assert found.certified and found.s == pytest.approx(np.linalg.svd(small.numpy(), compute_uv=False)[:16], rel=1e-5)
    assert krylov.leading(torch.zeros(300, 300), 4).s.tolist() == [0] * 4
    one, two = (krylov.leading(update(200), 16, seed=3) for _ in range(2))
    assert np.array_equal(one.v, two.v)
