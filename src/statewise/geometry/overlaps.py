"""The tier "masks": where the changed entries lie, beside what every null expects."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from statewise.geometry import masks, nulls
from statewise.geometry.checkpoints import Weights
from statewise.geometry.origin import Delta, Origin

if TYPE_CHECKING:
    import torch

PERMUTED = 1 << 22  # entries of D that stand for all of them in the permuted null


def overlaps(
    origin: Origin, after: Weights, delta: Delta, moved: np.ndarray, row: dict[str, Any]
) -> tuple[dict[str, Any], nulls.GateNull | None]:
    """Overlaps beside their nulls, and the share of D in the leading subspaces of W0."""
    settings, shape = origin.settings, origin.matrix.shape
    counts = masks.count_masks(origin.codes, origin.counts, moved, origin.principal, settings.alpha)
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
