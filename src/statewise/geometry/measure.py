"""All measurements of one matrix: a start, an end, and the tiers that are asked for.

    support   which entries differ in bf16, and how they lie in rows, columns and heads
    update    norms, cosine, and the leading part of the spectrum of D = W+ - W0
    spectrum  all singular values of W0, W+ and D
    angles    rotation of the leading singular subspaces of W0
    masks     overlaps of the changed entries with masks of W0, and the nulls that make them mean something
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from statewise.geometry import angles, codes, krylov, masks, nulls, spectrum
from statewise.geometry.checkpoints import Weights
from statewise.stats import spectra

if TYPE_CHECKING:
    import torch

    from statewise.geometry.cache import Known
    from statewise.geometry.matrices import Matrix

TIERS = ("support", "update", "spectrum", "angles", "masks")
ENERGIES = (1, 2, 4, 8, 16)
HILL_CURVE = (5, 10, 16, 32, 64, 128, 256, 512, 1024)
# Above these the first order is off by more than about half a percent of NSS, and of the angles.
FIRST_ORDER_NORM, FIRST_ORDER_DEGREES = 2e-3, 3.0
PERMUTED = 1 << 22  # entries of D that stand for all of them in the permuted null


@dataclass(frozen=True)
class Settings:
    """`top`: K, the leading triplets of D; `hill_k`; `angle_k`: at most half the short side; `rank`, `alpha`: of the principal
    mask, the rank at most a quarter of the short side; `values`: "stored", or "bf16" to round everything first.
    """

    tiers: tuple[str, ...] = ("support", "update")
    tolerance: float = 1e-5
    top: int = 16
    hill_k: int = 16
    angle_k: int = 512
    rank: int = 64
    alpha: float = 0.3
    values: str = "stored"
    cache: str | None = None
    device: str = "cpu"
    seed: int = 0

    def has(self, *tiers: str) -> bool:
        return any(tier in self.tiers for tier in tiers)


class Origin:
    """The start weights of a matrix, and what several checkpoints need of them, computed once."""

    def __init__(self, matrix: Matrix, before: Weights, settings: Settings):
        self.matrix, self.settings = matrix, settings
        self.before = _rounded(before) if settings.values == "bf16" else before

    @property
    def short(self) -> int:
        return min(self.matrix.shape)

    @property
    def angle_k(self) -> int:
        return min(self.settings.angle_k, self.short // 2)

    @property
    def rank(self) -> int:
        return max(1, min(self.settings.rank, self.short // 4))

    @cached_property
    def codes(self) -> np.ndarray:
        return _codes(self.before)

    @cached_property
    def known(self) -> Known | None:
        """From the cache, where there is one."""
        from statewise.geometry.cache import Cache

        settings = self.settings
        k = max(self.angle_k, self.rank)
        return Cache(settings.cache).get(self.before, k, settings.device) if settings.cache else None

    @cached_property
    def decomposition(self) -> spectrum.Decomposition:
        """With as many vectors as the tiers need."""
        k = max(self.angle_k if self.settings.has("angles") else 0, self.rank if self.settings.has("masks") else 0)
        if self.known is not None:
            return self.known.decomposition(k)
        return spectrum.decompose(self.before, k, self.settings.device)

    @cached_property
    def leading(self) -> spectrum.Decomposition:
        """The vectors of the principal mask: by Krylov where nothing else needs a decomposition and it can be certified."""
        if self.settings.cache or self.settings.has("spectrum", "angles"):
            return self.decomposition.leading(self.rank)
        found = krylov.leading(self.before.rows().float(), self.rank, self.settings.seed, max_blocks=12)
        if found.certified:
            return spectrum.Decomposition(found.s, found.u, found.v)
        return self.decomposition.leading(self.rank)

    @cached_property
    def principal(self) -> masks.PrincipalMask:
        lead = self.leading
        return masks.PrincipalMask.largest(lead.u, lead.s[: lead.k], lead.v, self.settings.alpha)


@dataclass(frozen=True)
class Delta:
    """D as float32, exact for bf16 pairs; `factored` where an adapter gives it as a product. `norm` in float64."""

    dense: torch.Tensor
    norm: float
    factored: spectrum.Decomposition | None

    @classmethod
    def of(cls, before: Weights, after: Weights) -> Delta:
        import torch

        if after.delta is not None and before.delta is None and torch.equal(before.stored, after.stored):
            factored = spectrum.factored(after.delta)
            dense = (after.delta.left @ after.delta.right).float()
            return cls(dense, float(np.linalg.norm(factored.s)), factored)
        dense = torch.empty(before.stored.shape, dtype=torch.float32)
        square = 0.0
        for low, high in masks.row_blocks((dense.shape[0], dense.shape[1])):
            part = after.rows(low, high).double() - before.rows(low, high).double()
            dense[low:high] = part
            square += float(part.square().sum())
        return cls(dense, math.sqrt(square), None)


@dataclass(frozen=True)
class Measured:
    """`row`: plain numbers and lists, NaN where something has no meaning for this pair. The rest is for comparing several
    updates: `moved` [m, n], the leading triplets of D, and the Gaussian gate null.
    """

    row: dict[str, Any]
    moved: np.ndarray | None = None
    leading: krylov.Leading | None = None
    gate: nulls.GateNull | None = None


def measure(origin: Origin, after: Weights) -> Measured:
    """All tiers of the settings; `seconds_*` in the row say what each took."""
    settings, matrix = origin.settings, origin.matrix
    after = _rounded(after) if settings.values == "bf16" else after
    row: dict[str, Any] = {"matrix": matrix.name, "module": matrix.module, "layer": matrix.layer}
    row |= {"rows": matrix.shape[0], "columns": matrix.shape[1], "entries": matrix.entries}
    moved = lead = gate = None
    clock = time.perf_counter()

    def took(tier: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        row[f"seconds_{tier}"], clock = now - clock, now

    if settings.has("support", "masks"):
        support, moved = _support(origin, after)
        row |= _describe_support(matrix, support)
        took("support")
    if not settings.has("update", "spectrum", "angles", "masks"):
        return Measured(row, moved)
    delta = Delta.of(origin.before, after)
    if min(matrix.shape) > 1 and delta.norm > 0:
        lead = _leading(delta, min(max(settings.top, settings.hill_k, *ENERGIES), origin.short), settings)
    row |= _update(origin, after, delta, lead)
    took("update")
    if lead is not None and settings.has("spectrum", "angles"):
        row |= _spectral(origin, after, delta)
        took("spectrum")
    if lead is not None and settings.has("masks"):
        assert moved is not None
        found, gate = _masks(origin, after, delta, moved, row)
        row |= found
        took("masks")
    return Measured(row, moved, lead, gate)


def _rounded(weights: Weights) -> Weights:
    import torch

    return Weights(weights.rows().to(torch.bfloat16))


def _codes(weights: Weights) -> np.ndarray:
    """Codes of the values, by blocks of rows: an adapter's float64 sum is never held whole."""
    shape = (weights.stored.shape[0], weights.stored.shape[1])
    if weights.delta is None:
        return codes.to_codes(weights.stored)
    return np.concatenate([codes.to_codes(weights.rows(low, high)) for low, high in masks.row_blocks(shape)])


def _support(origin: Origin, after: Weights) -> tuple[codes.Support, np.ndarray]:
    old, new = origin.codes, _codes(after)
    support = codes.Support(origin.matrix.shape)
    parts = [
        support.add(low, old[low:high], new[low:high], origin.settings.tolerance)
        for low, high in masks.row_blocks(origin.matrix.shape)
    ]
    return support, np.concatenate(parts)


def _describe_support(matrix: Matrix, support: codes.Support) -> dict[str, Any]:
    m, n = matrix.shape
    changed = max(support.changed, 1)
    return {
        "changed": support.changed,
        "sparsity": 1 - support.density,
        "sparsity_tolerance": support.within_tolerance / support.entries,
        "nan": support.nan,
        "one_ulp_share": support.one_ulp / changed,
        "largest_ulp": support.largest_ulp,
        "sign_flips": support.sign_flips,
        "row_dispersion": codes.dispersion(support.rows, n),
        "column_dispersion": codes.dispersion(support.columns, m),
        "rows_changed": (support.rows / n).tolist(),
        "columns_changed": (support.columns / m).tolist(),
        "heads_changed": support.heads(*matrix.head).tolist() if matrix.head else [],
    }


def _update(origin: Origin, after: Weights, delta: Delta, lead: krylov.Leading | None) -> dict[str, Any]:
    """Norms and cosine in float64, and what the certified leading part of D says."""
    old = _norm(origin.before, origin.matrix.shape)
    new = _norm(after, origin.matrix.shape)
    # 1 - cos from the difference: for near-equal matrices the cosine itself is 1 to rounding.
    gap = max(delta.norm**2 - (new - old) ** 2, 0.0) / (2 * old * new) if old and new else math.nan
    row: dict[str, Any] = {
        "delta_norm": delta.norm,
        "before_norm": old,
        "relative_norm": delta.norm / old if old else math.nan,
        "cosine": 1 - gap,
        "one_minus_cosine": gap,
    }
    if lead is None:
        return row
    settings, total, s = origin.settings, delta.norm**2, lead.s
    row |= {
        "sigma_1": float(s[0]),
        "stable_rank": spectra.stable_rank(s, total),
        "spectral_share": float(s[0]) / delta.norm,
        "hill": spectra.hill(s, min(settings.hill_k, len(s))),
        "top_gap": spectra.relative_gap(s, settings.top) if len(s) > settings.top else lead.gap,
        "residual": lead.residual,
        "certified": lead.certified,
        "leading": s.tolist(),
    }
    return row | {f"top_{i}_energy": spectra.top_energy(s, i, total) for i in ENERGIES if i <= len(s)}


def _norm(weights: Weights, shape: tuple[int, int]) -> float:
    return math.sqrt(sum(float(weights.rows(*b).double().square().sum()) for b in masks.row_blocks(shape)))


def _leading(delta: Delta, k: int, settings: Settings) -> krylov.Leading:
    """From the core of an adapter, by certified Krylov, else from the whole decomposition."""
    if delta.factored is None:
        found = krylov.leading(delta.dense.to(settings.device), k, settings.seed)
        if found.certified:
            return found
    whole = delta.factored or spectrum.decompose(Weights(delta.dense), k, settings.device)
    u, v = (side[:, :k].astype(np.float32) for side in (whole.u, whole.v))
    return krylov.Leading(whole.s[:k], u, v, 0.0, 0.0, spectra.relative_gap(whole.s, min(k, len(whole.s))), 0)


def _spectral(origin: Origin, after: Weights, delta: Delta) -> dict[str, Any]:
    """Spectra of W0, W+ and D, and the angles; to first order where the cache and the size of D allow it."""
    settings, k = origin.settings, origin.angle_k
    before, found = None, None
    if origin.known is not None and delta.norm <= FIRST_ORDER_NORM * float(np.linalg.norm(origin.known.s)):
        found = angles.first_order(origin.known, delta.dense, k)
        found = found if max(found.left[0], found.right[0]) <= FIRST_ORDER_DEGREES else None
    if found is not None:
        assert origin.known is not None
        old, new, turned = origin.known.s, found.s, {"u": found.left, "v": found.right}
    else:
        before = origin.decomposition
        end = spectrum.decompose(after, k if settings.has("angles") else 0, settings.device)
        k = min(k, before.k, end.k) if settings.has("angles") else 0
        old, new, turned = before.s, end.s, angles.exact_angles(before, end, k) if k else {}
    row: dict[str, Any] = {"method": "first_order" if found is not None else "exact"}
    if settings.has("spectrum"):
        row |= _describe_spectra(old, new, delta, settings)
    if settings.has("angles"):
        row |= angles.describe(old, k, turned) | _noise(old, origin.matrix.shape, delta.norm, k, settings.seed)
        if before is not None and k:
            row |= _at_wide_gap(old, before, end, k)
    return row


def _at_wide_gap(old: np.ndarray, before: Any, end: Any, k: int) -> dict[str, Any]:
    wide = angles.wide_gap_k(old, k)
    turned = angles.exact_angles(before, end, wide)
    return {"angle_wide_k": wide, **{f"angle_{side}_wide_max": float(values[0]) for side, values in turned.items()}}


def _noise(s: np.ndarray, shape: tuple[int, int], norm: float, k: int, seed: int) -> dict[str, float]:
    """What Gaussian noise of the same norm would turn; NaN where that is beyond first order."""
    if not k:
        return {}
    found = dict(zip("uv", angles.noise_angles(s, shape, norm, k, seed), strict=True))
    if max(values[0] for values in found.values()) > FIRST_ORDER_DEGREES:
        return {f"angle_{side}_noise_{name}": math.nan for side in found for name in ("max", "mean")}
    return {
        f"angle_{side}_noise_{name}": value
        for side, values in found.items()
        for name, value in (("max", float(values[0])), ("mean", float(values.mean())))
    }


def _describe_spectra(old: np.ndarray, new: np.ndarray, delta: Delta, settings: Settings) -> dict[str, Any]:
    own = delta.factored.s if delta.factored else spectrum.singular_values(Weights(delta.dense), settings.device)
    ks = [k for k in HILL_CURVE if k <= len(own)]
    return {
        "nss": spectra.spectral_shift(old, new),
        "nss_floor": spectra.shift_floor(old),
        "drift_ratio": spectra.drift_ratio(old, new, delta.norm),
        "drift_ratio_noise": 1 / math.sqrt(max(delta.dense.shape)),  # ds_i = u_i^T D v_i of i.i.d. entries
        "effective_rank": spectra.effective_rank(own, 1),
        "effective_rank_energy": spectra.effective_rank(own, 2),
        "participation": spectra.participation(own, 2),
        "participation_sigma": spectra.participation(own, 1),
        "hill_curve_k": ks,
        "hill_curve": spectra.hill_curve(own, ks),
        "spectrum_before": old.tolist(),
        "spectrum_after": new.tolist(),
        "spectrum_delta": own.tolist(),
    }


def _masks(
    origin: Origin, after: Weights, delta: Delta, moved: np.ndarray, row: dict[str, Any]
) -> tuple[dict[str, Any], nulls.GateNull | None]:
    """Overlaps beside their nulls, and the share of D in the leading subspaces of W0."""
    settings, shape = origin.settings, origin.matrix.shape
    counts = masks.count_masks(origin.codes, moved, origin.principal, settings.alpha)
    found: dict[str, Any] = {"mask_rank": origin.rank, "mask_alpha": settings.alpha, "low_ties": counts.ties}
    gates = {law: nulls.gate_null(counts, law) for law in ("gaussian", "sign")}
    if _is_finer(after):
        gates["permuted"] = nulls.gate_null(counts, "permuted", _sorted_entries(delta.dense, settings.seed))
    for law, null in gates.items():
        found |= {f"{law}_scale": null.scale, f"{law}_density": null.density} if null else {}
    for name in masks.MASKS:
        found |= _describe_overlap(name, counts, gates)
    lead, total = origin.leading, delta.norm**2
    shares = masks.projections(delta.dense, lead.u, lead.v, total)
    spread = nulls.subspace_spread(shape, lead.k, _participation(row, total))
    for side, expected in nulls.subspace_null(shape, lead.k).items():
        compared = nulls.Expected(expected, spread[side]).compare(shares[side])
        found[f"projection_{side}"] = shares[side]
        found |= {f"projection_{side}_{key}": value for key, value in compared.items()}
    return found, gates["gaussian"]


def _is_finer(weights: Weights) -> bool:
    """Whether the values are known to more digits than bf16 has."""
    import torch

    return weights.delta is not None or weights.stored.dtype != torch.bfloat16


def _sorted_entries(delta: torch.Tensor, seed: int) -> np.ndarray:
    flat = delta.numpy().ravel()
    if len(flat) > PERMUTED:
        flat = flat[np.random.default_rng(seed).integers(len(flat), size=PERMUTED)]
    return np.sort(flat.astype(np.float64))


def _describe_overlap(name: str, counts: masks.MaskCounts, gates: dict[str, nulls.GateNull | None]) -> dict[str, Any]:
    observed, density = counts.overlap(name), counts.density(name)
    row = {
        f"{name}_overlap": observed,
        f"{name}_density": density,
        f"{name}_enrichment": observed / density if density else math.nan,
    }
    expected = {law: null.overlaps[name] for law, null in gates.items() if null is not None}
    expected |= {f"within_{w}": nulls.permutation_null(counts, name, w) for w in ("matrix", "rows", "columns")}
    for law, value in expected.items():
        row |= {f"{name}_{law}_{key}": number for key, number in value.compare(observed).items()}
    return row


def _participation(row: dict[str, Any], total: float) -> float:
    """Of energies; where only the leading values are known, the least it can be, so that the spread is not too small."""
    if "participation" in row:
        return float(row["participation"])
    s = np.asarray(row["leading"])
    return total**2 / float((s**4).sum() + s[-1] ** 2 * max(total - float((s**2).sum()), 0.0))
