"""Masks, overlaps and their nulls: closed forms, sampled nulls, and the published pattern that noise alone makes."""

import math

import numpy as np
import pytest
import torch

from statewise.geometry import masks, nulls
from statewise.geometry.codes import changed, from_codes, to_codes

SIDE = 512


def heavy_tailed(side: int = SIDE, seed: int = 0) -> torch.Tensor:
    """Student-t weights with 4 degrees of freedom, in bf16."""
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.standard_t(4, (side, side)) * 0.015).bfloat16()


def factors(w: torch.Tensor, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    u, s, vt = np.linalg.svd(w.double().numpy(), full_matrices=False)
    return u[:, :rank], s[:rank], vt[:rank].T


def counted(w: torch.Tensor, after: torch.Tensor, alpha: float = 0.3, rank: int = 64) -> masks.MaskCounts:
    principal = masks.PrincipalMask.largest(*factors(w, rank), alpha)
    codes = to_codes(w)
    return masks.count_masks(codes, masks.count_codes(codes), changed(codes, to_codes(after)), principal, alpha)


def noise_of_density(w: torch.Tensor, density: float, seed: int = 1) -> torch.Tensor:
    """W0 + c N(0, 1), c such that this share of entries changes; by bisection on the very noise."""
    z = torch.from_numpy(np.random.default_rng(seed).standard_normal(tuple(w.shape)))
    low, high = 1e-9, 1.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        share = changed(to_codes(w), to_codes(w.double() + middle * z)).mean()
        low, high = (middle, high) if share < density else (low, middle)
    return w.double() + high * z


# Densities of the paper's SFT, OPD and RLVR, and the overlaps that geometry-blind noise makes at them.
BLIND = [(0.9273, 0.319, 0.294), (0.4628, 0.542, 0.264), (0.2776, 0.740, 0.256)]


@pytest.mark.parametrize(("density", "low", "principal"), BLIND)
def test_noise_alone_makes_the_published_pattern(density: float, low: float, principal: float) -> None:
    w = heavy_tailed(1024)
    counts = counted(w, noise_of_density(w, density))
    assert counts.num_moved / w.numel() == pytest.approx(density, abs=1e-3)
    assert counts.overlap("low") == pytest.approx(low, abs=0.01)
    # Rank 64 of 1024 holds another share of the energy than in the reference's matrix.
    assert counts.overlap("principal") == pytest.approx(principal, abs=0.02) and counts.overlap("principal") < 0.3
    null = nulls.gate_null(counts, "gaussian")
    assert null is not None and null.density == pytest.approx(density, abs=1e-3)
    for mask in masks.MASKS:
        compared = null.overlaps[mask].compare(counts.overlap(mask))
        assert abs(compared["excess"]) < 3 * null.overlaps[mask].sd
    assert abs(counts.overlap("low") - 0.3) > 10 * nulls.permutation_null(counts, "low", "matrix").sd or density > 0.9


def test_sign_noise_is_another_law() -> None:
    """Constant steps: low-magnitude overlap .69 to .81 at density near .4 and above .99 near .2."""
    w = heavy_tailed()
    sign = torch.from_numpy(np.random.default_rng(2).choice([-1.0, 1.0], (SIDE, SIDE)))
    for step, density, low, high in ((2.5e-5, 0.37, 0.69, 0.83), (1.2e-5, 0.19, 0.99, 1.0)):
        counts = counted(w, w.double() + step * sign)
        assert counts.num_moved / w.numel() == pytest.approx(density, abs=0.03)
        null = nulls.gate_null(counts, "sign")
        assert null is not None and low <= counts.overlap("low") <= high
        assert null.overlaps["low"].mean == pytest.approx(counts.overlap("low"), abs=0.01)
        gaussian = nulls.gate_null(counts, "gaussian")
        assert gaussian is not None and gaussian.overlaps["low"].mean < counts.overlap("low") - 0.02


def test_gate_null_is_what_sampling_gives() -> None:
    w = heavy_tailed(256)
    counts = counted(w, noise_of_density(w, 0.4), rank=16)
    null = nulls.gate_null(counts, "gaussian")
    assert null is not None
    random = np.random.default_rng(5)
    drawn = [
        counted(w, w.double() + null.scale * torch.from_numpy(random.standard_normal((256, 256))), rank=16)
        for _ in range(30)
    ]
    for mask in ("principal", "low"):
        overlaps = [c.overlap(mask) for c in drawn]
        assert np.mean(overlaps) == pytest.approx(
            null.overlaps[mask].mean, abs=4 * null.overlaps[mask].sd / math.sqrt(30)
        )
        assert np.std(overlaps) == pytest.approx(null.overlaps[mask].sd, rel=0.5)


def test_permuted_entries_through_the_gate() -> None:
    w = heavy_tailed(256)
    d = torch.from_numpy(np.random.default_rng(6).laplace(size=(256, 256)) * 4e-5)
    counts = counted(w, w.double() + d, rank=16)
    null = nulls.gate_null(counts, "permuted", np.sort(d.numpy().ravel()))
    assert null is not None and null.scale == 1.0
    dealt = d.ravel()[torch.randperm(d.numel(), generator=torch.Generator().manual_seed(0))].reshape(d.shape)
    again = counted(w, w.double() + dealt, rank=16)
    assert null.density == pytest.approx(again.num_moved / w.numel(), abs=5e-3)
    assert null.overlaps["low"].mean == pytest.approx(again.overlap("low"), abs=4 * null.overlaps["low"].sd)
    with pytest.raises(ValueError, match="sorted entries"):
        nulls.gate_null(counts, "permuted")


def test_ties_to_even_in_the_null() -> None:
    """Entries of D at exactly half a unit: an even code stays, an odd one moves."""
    w = torch.tensor([[1.0, 1.0078125]] * 64).bfloat16()
    half = np.full(128, 2.0**-8)
    counts = counted(w, w.float() + 2.0**-8, rank=1)
    null = nulls.gate_null(counts, "permuted", half)
    assert null is not None and counts.num_moved == 64 and null.density == 0.5


def test_nothing_or_everything_changed_has_no_null() -> None:
    w = heavy_tailed(64)
    assert nulls.gate_null(counted(w, w, rank=4), "gaussian") is None
    assert nulls.gate_null(counted(w, w.float() * 2 + 1, rank=4), "gaussian") is None
    assert math.isnan(counted(w, w, rank=4).overlap("low"))
    assert math.isnan(nulls.permutation_null(counted(w, w, rank=4), "low", "rows").mean)


def test_independent_masks_overlap_by_their_density() -> None:
    """alpha ± sqrt(alpha (1 - alpha) / |M|), and Jaccard pq / (p + q - pq) = .2069 for .4 and .3."""
    random = np.random.default_rng(7)
    w = heavy_tailed()
    codes, moved = to_codes(w), random.random((SIDE, SIDE)) < 0.4
    counts = masks.count_masks(
        codes, masks.count_codes(codes), moved, masks.PrincipalMask.largest(*factors(w, 32), 0.3), 0.3
    )
    spread = math.sqrt(0.3 * 0.7 / moved.sum())
    for mask in ("principal", "low"):
        null = nulls.permutation_null(counts, mask, "matrix")
        assert null.mean == pytest.approx(0.3, abs=1e-5) and null.sd == pytest.approx(spread * math.sqrt(0.6), rel=0.01)
        assert counts.overlap(mask) == pytest.approx(0.3, abs=4 * spread)
    other = random.random((SIDE, SIDE)) < 0.3
    assert masks.independent_jaccard(0.4, 0.3) == pytest.approx(0.2069, abs=1e-4)
    assert masks.jaccard(moved, other) == pytest.approx(0.2069, abs=5e-3)
    assert math.isnan(masks.jaccard(moved & False, moved & False))


def test_permutation_within_rows_keeps_stripes() -> None:
    """All changes in rows of small weights: within the matrix that is an excess, within rows it is none."""
    scale = torch.ones(128, 1)
    scale[:40] = 0.01
    w = (torch.randn(128, 128, generator=torch.Generator().manual_seed(0)) * scale).bfloat16()
    moved = np.zeros((128, 128), dtype=bool)
    moved[:40] = np.random.default_rng(8).random((40, 128)) < 0.5
    counts = masks.count_masks(
        to_codes(w), masks.count_codes(to_codes(w)), moved, masks.PrincipalMask.largest(*factors(w, 8), 0.3), 0.3
    )
    rows, whole = (nulls.permutation_null(counts, "low", within) for within in ("rows", "matrix"))
    assert abs(counts.overlap("low") - rows.mean) < 4 * rows.sd
    assert counts.overlap("low") - whole.mean > 20 * whole.sd
    columns = nulls.permutation_null(counts, "low", "columns")
    assert columns.mean == pytest.approx(whole.mean, abs=0.02)


def test_masks_are_what_sorting_gives() -> None:
    w = heavy_tailed(128)
    u, s, v = factors(w, 16)
    principal = masks.PrincipalMask.largest(u, s, v, 0.25)
    chosen = np.concatenate([principal.rows(*b) for b in masks.row_blocks(principal.shape)])
    exact = np.abs((u * s) @ v.T)
    assert chosen.sum() == round(0.25 * exact.size)
    assert exact[chosen].min() >= exact[~chosen].max() * (1 - 1e-5)
    weights, ties = masks.low_weights(masks.count_codes(to_codes(w)), 0.25)
    magnitude = to_codes(w) & 0x7FFF
    assert weights[magnitude].sum() == pytest.approx(0.25 * w.numel(), rel=1e-9)
    threshold = from_codes(np.array([magnitude[weights[magnitude] == 1].max()]))[0]
    assert np.quantile(w.float().abs().numpy(), 0.25) == pytest.approx(threshold, rel=2**-7)
    assert 0 < ties < 0.02


def test_massive_ties_are_split_and_told() -> None:
    w = torch.full((32, 32), 0.5).bfloat16()
    w[:4] = 1.0
    weights, ties = masks.low_weights(masks.count_codes(to_codes(w)), 0.35)
    assert weights[to_codes(w) & 0x7FFF].mean() == pytest.approx(0.35) and ties == pytest.approx(28 / 32)


def test_safe_mask_is_what_the_principal_only_leaves() -> None:
    w = heavy_tailed(128)
    counts = counted(w, noise_of_density(w, 0.5), rank=8)
    assert counts.overlap("principal_not_low") + counts.overlap("low_or_not_principal") == pytest.approx(1)
    assert counts.density("principal_not_low") <= counts.density("principal") == pytest.approx(0.3, abs=1e-3)


def test_projection_of_one_singular_pair() -> None:
    """D = u_i v_j^T lies in the leading k x k block, and in each side's k, or does not."""
    w = torch.randn(60, 90, generator=torch.Generator().manual_seed(9)).double()
    u, _, vt = torch.linalg.svd(w, full_matrices=False)
    lead = u[:, :8].numpy(), vt[:8].T.numpy()
    for i, j in ((2, 3), (2, 30), (30, 3), (30, 31)):
        d = torch.outer(u[:, i], vt[j]).float()
        shares = masks.projections(d, *lead, 1.0)
        expected = {"left": i < 8, "right": j < 8, "both": i < 8 and j < 8}
        assert shares == pytest.approx({name: float(value) for name, value in expected.items()}, abs=1e-5)


def test_projection_of_noise_is_the_random_subspace_null() -> None:
    m, n, k = 80, 120, 10
    random = np.random.default_rng(10)
    d = random.standard_normal((m, n))
    total = float((d**2).sum())
    s = np.linalg.svd(d, compute_uv=False)
    spread = nulls.subspace_spread((m, n), k, float((s**2).sum()) ** 2 / float((s**4).sum()))
    expected = nulls.subspace_null((m, n), k)
    assert expected == pytest.approx({"both": k * k / (m * n), "left": k / m, "right": k / n})
    drawn: dict[str, list[float]] = {"both": [], "left": [], "right": []}
    for _ in range(300):
        u, v = (np.linalg.qr(random.standard_normal((size, k)))[0] for size in (m, n))
        for name, share in masks.projections(torch.from_numpy(d).float(), u, v, total).items():
            drawn[name].append(share)
    for name, shares in drawn.items():
        assert np.mean(shares) == pytest.approx(expected[name], abs=4 * spread[name] / math.sqrt(300))
        assert np.std(shares) == pytest.approx(spread[name], rel=0.25)


def test_spread_of_a_low_rank_update() -> None:
    m, n, k = 60, 60, 6
    random = np.random.default_rng(11)
    d = np.outer(random.standard_normal(m), random.standard_normal(n))
    spread = nulls.subspace_spread((m, n), k, 1.0)
    shares = []
    for _ in range(400):
        u = np.linalg.qr(random.standard_normal((m, k)))[0]
        shares.append(float(((u.T @ d) ** 2).sum() / (d**2).sum()))
    assert np.std(shares) == pytest.approx(spread["left"], rel=0.2) and np.mean(shares) == pytest.approx(k / m, rel=0.1)


def test_two_updates_through_one_gate_share_more_than_independent_masks() -> None:
    w = heavy_tailed(256)
    one, two = (counted(w, noise_of_density(w, p, seed), rank=16) for p, seed in ((0.4, 20), (0.3, 21)))
    gates = [nulls.gate_null(c, "gaussian") for c in (one, two)]
    assert gates[0] is not None and gates[1] is not None
    codes = to_codes(w)
    moved = [changed(codes, to_codes(noise_of_density(w, p, seed))) for p, seed in ((0.4, 20), (0.3, 21))]
    expected = nulls.gate_jaccard(one.every, gates[0], gates[1])
    assert masks.jaccard(moved[0], moved[1]) == pytest.approx(expected, abs=0.01)
    assert expected > masks.independent_jaccard(0.4, 0.3) + 0.05


def test_sparsity_of_noise_of_a_norm() -> None:
    w = heavy_tailed()
    d = torch.from_numpy(np.random.default_rng(12).standard_normal((SIDE, SIDE)) * 5e-5)
    every = np.bincount(to_codes(w).ravel(), minlength=1 << 16)
    expected = 1 - changed(to_codes(w), to_codes(w.double() + d)).mean()
    assert nulls.noise_sparsity(every, float(d.norm())) == pytest.approx(expected, abs=3e-3)
    assert nulls.noise_sparsity(every, 0.0) == pytest.approx(1.0)
