"""The tiers "spectrum" and "angles": exact, or to first order where the cache and the size of D allow it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from statewise.geometry import angles, spectrum
from statewise.geometry.checkpoints import Weights
from statewise.geometry.origin import Delta, Origin, Settings
from statewise.stats import spectra

HILL_CURVE = (5, 10, 16, 32, 64, 128, 256, 512, 1024)
# Above these the first order is off by more than about half a percent of NSS, and of the angles.
FIRST_ORDER_NORM, FIRST_ORDER_DEGREES = 2e-3, 3.0
NOISE_DEGREES = 20.0  # of the yardstick alone, which may be some percent off


def spectra_and_angles(origin: Origin, after: Weights, delta: Delta) -> dict[str, Any]:
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
    if max(values[0] for values in found.values()) > NOISE_DEGREES:
        return {f"angle_{side}_noise_{name}": math.nan for side in found for name in ("max", "mean")}
    return {
        f"angle_{side}_noise_{name}": value
        for side, values in found.items()
        for name, value in (("max", float(values[0])), ("mean", float(values.mean())))
    }


def _describe_spectra(old: np.ndarray, new: np.ndarray, delta: Delta, settings: Settings) -> dict[str, Any]:
    own = delta.factored.s if delta.factored else spectrum.update_values(delta.dense, settings.device)
    ks = [k for k in HILL_CURVE if k <= len(own) // 2]  # the lower half is no tail
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
