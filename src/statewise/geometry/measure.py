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
from typing import TYPE_CHECKING, Any

import numpy as np

from statewise.geometry import codes, krylov, nulls, spectrum
from statewise.geometry.checkpoints import Weights
from statewise.geometry.masks import row_blocks
from statewise.geometry.origin import ENERGIES, Delta, Origin, Settings, bf16_codes, rounded
from statewise.geometry.overlaps import overlaps
from statewise.geometry.turns import spectra_and_angles
from statewise.stats import spectra

if TYPE_CHECKING:
    from statewise.geometry.matrices import Matrix


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
    after = rounded(after) if settings.values == "bf16" else after
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
    if not math.isfinite(delta.norm):
        raise ArithmeticError(spectrum.NOT_FINITE)
    if min(matrix.shape) > 1 and delta.norm > 0:
        lead = _leading(delta, min(max(settings.top, settings.hill_k, *ENERGIES), origin.short), settings)
    row |= _update(origin, after, delta, lead)
    if moved is not None:
        row["sparsity_noise"] = nulls.noise_sparsity(origin.counts, delta.norm)
    took("update")
    if lead is not None and settings.has("spectrum", "angles"):
        row |= spectra_and_angles(origin, after, delta)
        took("spectrum")
    if lead is not None and settings.has("masks"):
        assert moved is not None
        found, gate = overlaps(origin, after, delta, moved, row)
        row |= found
        took("masks")
    return Measured(row, moved, lead, gate)


def _support(origin: Origin, after: Weights) -> tuple[codes.Support, np.ndarray]:
    old, new = origin.codes, bf16_codes(after)
    support = codes.Support(origin.matrix.shape)
    parts = [
        support.add(low, old[low:high], new[low:high], origin.settings.tolerance)
        for low, high in row_blocks(origin.matrix.shape)
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
    return math.sqrt(sum(float(weights.rows(*b).double().square().sum()) for b in row_blocks(shape)))


def _leading(delta: Delta, k: int, settings: Settings) -> krylov.Leading:
    """From the core of an adapter, by certified Krylov, else from the whole decomposition."""
    if delta.factored is None:
        found = krylov.leading(delta.dense.to(settings.device), k, settings.seed)
        if found.certified:
            return found
    whole = delta.factored or spectrum.decompose(Weights(delta.dense), k, settings.device)
    u, v = (side[:, :k].astype(np.float32) for side in (whole.u, whole.v))
    return krylov.Leading(whole.s[:k], u, v, 0.0, 0.0, spectra.relative_gap(whole.s, min(k, len(whole.s))), 0)
