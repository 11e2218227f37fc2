"""Exact rotations of a known size, and what first order makes of small and of large updates."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from statewise.geometry import angles
from statewise.geometry.cache import Cache, content_key
from statewise.geometry.checkpoints import Weights
from statewise.geometry.matrices import Matrix
from statewise.geometry.measure import measure
from statewise.geometry.origin import Origin, Settings
from statewise.geometry.spectrum import decompose
from statewise.stats.spectra import spectral_shift

SHAPE = (200, 300)


def decaying(seed: int = 0, shape: tuple[int, int] = SHAPE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    u, s, vt = torch.linalg.svd(torch.randn(*shape, generator=generator, dtype=torch.float64), full_matrices=False)
    return (u * (s * torch.linspace(3, 1, len(s)))) @ vt


def test_rotation_of_one_side_is_seen_there_alone() -> None:
    """The k leading left vectors turned by theta into the next k, s and V kept: U all theta, V zero, NSS zero."""
    w, k = decaying(), 32
    u, s, vt = torch.linalg.svd(w, full_matrices=False)
    for degrees in (1e-3, 0.5, 5.0, 30.0):
        theta = math.radians(degrees)
        turned = u.clone()
        turned[:, :k] = math.cos(theta) * u[:, :k] + math.sin(theta) * u[:, k : 2 * k]
        turned[:, k : 2 * k] = math.cos(theta) * u[:, k : 2 * k] - math.sin(theta) * u[:, :k]
        before, after = (decompose(Weights(x), k) for x in (w, (turned * s) @ vt))
        found = angles.exact_angles(before, after, k)
        assert found["u"] == pytest.approx(np.full(k, degrees), abs=1e-9 if degrees > 1e-2 else 1e-5)
        assert found["v"].max() < 1e-8
        assert spectral_shift(before.s, after.s) < 1e-14
    assert found["v"].max() < found["u"].min()  # swapped sides would not do


@pytest.mark.parametrize("shape", [SHAPE, (300, 200), (200, 200)])
def test_first_order(tmp_path: Path, shape: tuple[int, int]) -> None:
    """Within the reference's errors at ‖D‖ / ‖W‖ = 8e-4: 1 % of NSS, 2 % of the angles; useless at 100 times that."""
    w = decaying(1, shape)
    d = torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    d *= 8e-4 * w.norm() / d.norm()
    known, k = Cache(tmp_path).get(Weights(w), 64), 64
    before = decompose(Weights(w), k)
    for factor, shift_error, angle_error in ((1.0, 0.02, 0.03), (100.0, None, None)):
        after = decompose(Weights(w + factor * d), k)
        exact = angles.exact_angles(before, after, k)
        first = angles.first_order(known, (factor * d).float(), k)
        for found, side in ((first.left, "u"), (first.right, "v")):
            off = np.linalg.norm(found - exact[side]) / np.linalg.norm(exact[side])
            assert off < angle_error if angle_error else off > 0.02
        true = spectral_shift(before.s, after.s)
        off = abs(spectral_shift(known.s, first.s) / true - 1)
        assert off < shift_error if shift_error else off > 0.1


def test_first_order_needs_the_signs_of_its_formula(tmp_path: Path) -> None:
    """With s_i and s_j exchanged the left angles would be the right ones."""
    w = decaying(1)
    d = torch.randn(*SHAPE, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 1e-4
    k = 64
    before, after = decompose(Weights(w), k), decompose(Weights(w + d), k)
    exact = angles.exact_angles(before, after, k)
    first = angles.first_order(Cache(tmp_path).get(Weights(w), k), d.float(), k)
    assert first.left == pytest.approx(exact["u"], rel=0.02) and first.right == pytest.approx(exact["v"], rel=0.02)
    assert np.abs(first.left / exact["v"] - 1).max() > 0.05


def test_angles_of_noise_are_what_noise_makes() -> None:
    w, k = decaying(3), 64
    before = decompose(Weights(w), k)
    d = torch.randn(*SHAPE, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 1e-4
    exact = angles.exact_angles(before, decompose(Weights(w + d), k), k)
    left, right = angles.noise_angles(before.s, SHAPE, float(d.norm()), k)
    assert left.mean() == pytest.approx(exact["u"].mean(), rel=0.1) and right.mean() == pytest.approx(
        exact["v"].mean(), rel=0.1
    )
    again = angles.noise_angles(before.s, SHAPE, 2 * float(d.norm()), k)[0]
    assert again.mean() == pytest.approx(2 * left.mean(), rel=0.05)


def measured(w: torch.Tensor, after: torch.Tensor, cache: Path | None) -> dict:
    matrix = Matrix("w", "w", "q", 0, (w.shape[0], w.shape[1]))
    settings = Settings(("update", "spectrum", "angles"), cache=str(cache) if cache else None)
    return measure(Origin(matrix, Weights(w), settings), Weights(after)).row


def test_first_order_is_left_where_it_would_be_wrong(tmp_path: Path) -> None:
    w = decaying(5).float()
    d = torch.randn(*SHAPE, generator=torch.Generator().manual_seed(6)) * 1e-4 * float(w.norm()) / math.sqrt(w.numel())
    for factor, method in ((1.0, "first_order"), (200.0, "exact")):
        near, exact = (measured(w, w + factor * d, cache) for cache in (tmp_path, None))
        assert near["method"] == method and exact["method"] == "exact"
        tight = 0.03 if method == "first_order" else 1e-6
        for name in ("nss", "angle_u_max", "angle_v_mean", "drift_ratio", "stable_rank"):
            assert near[name] == pytest.approx(exact[name], rel=tight)


def test_the_cache_goes_by_content(tmp_path: Path) -> None:
    w = decaying(7).bfloat16()
    cache = Cache(tmp_path)
    first = cache.get(Weights(w), 16)
    files = sorted(tmp_path.rglob("*.safetensors"))
    times = [f.stat().st_mtime_ns for f in files]
    again = cache.get(Weights(w.clone()), 16)
    assert [f.stat().st_mtime_ns for f in files] == times and np.array_equal(first.s, again.s)
    other = w.clone()
    other[0, 0] += 1
    assert len({content_key(Weights(x), 16) for x in (w, other, w.float())} | {content_key(Weights(w), 8)}) == 4
    exact = decompose(Weights(w), 16)
    kept = first.decomposition(16)
    assert kept.s == pytest.approx(exact.s, rel=1e-12) and np.abs((kept.u * exact.u).sum(0)) == pytest.approx(
        np.ones(16)
    )
    assert first.k == 16 and first.u.shape == (200, 200) and first.v.shape == (300, 200)


def test_an_adapter_is_exact_from_its_core() -> None:
    from statewise.geometry.checkpoints import LowRank

    w = decaying(8).bfloat16()
    generator = torch.Generator().manual_seed(9)
    left, right = (torch.randn(*s, generator=generator, dtype=torch.float64) * 1e-3 for s in ((200, 4), (4, 300)))
    matrix, settings = Matrix("w", "w", "q", 0, SHAPE), Settings(("support", "update", "spectrum", "angles", "masks"))
    row = measure(Origin(matrix, Weights(w), settings), Weights(w, LowRank(left, right))).row
    dense = measure(Origin(matrix, Weights(w), settings), Weights(w.double() + left @ right)).row
    assert row["effective_rank"] <= 4 and row["certified"]
    for name in ("delta_norm", "stable_rank", "nss", "angle_u_max", "sparsity", "low_overlap", "top_2_energy"):
        assert row[name] == pytest.approx(dense[name], rel=1e-6), name
