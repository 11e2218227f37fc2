"""What the overlaps would be if the update knew nothing of the geometry of W0.

A changed entry is one that the update moved past half a unit in the last place, and that unit grows with |w|. So small
entries change more often whatever the update is, and the share alpha is the wrong yardstick. The gate null asks instead:
which entries would i.i.d. noise change, scaled so that as many change as did?

All of it is exact. The chance that w + noise rounds to another bf16 number depends on w's code alone, so expected counts
are sums over 65,536 codes, and their spread that of independent draws: no sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from statewise.geometry.codes import NUM_CODES, from_codes, rounding_bounds
from statewise.geometry.masks import MASKS, MaskCounts

Z95 = 1.959964
BISECTIONS = 60
Stay = Callable[[np.ndarray, np.ndarray, np.ndarray, float], np.ndarray]


@dataclass(frozen=True)
class Expected:
    """The overlap that a null expects, and its standard deviation from draw to draw."""

    mean: float
    sd: float

    def compare(self, observed: float) -> dict[str, float]:
        """null, excess = observed - null, and the interval that the excess has with 95 % under no other cause than chance."""
        excess, half = observed - self.mean, Z95 * self.sd
        return {"null": self.mean, "excess": excess, "excess_low": excess - half, "excess_high": excess + half}


@dataclass(frozen=True)
class GateNull:
    """`scale`: that of the noise, in units of the weights; `density`: the share of entries it changes; `chance`: that of an
    entry to change, by its bf16 code [65536].
    """

    law: str
    scale: float
    density: float
    chance: np.ndarray
    overlaps: dict[str, Expected]


def gate_null(counts: MaskCounts, law: str, values: np.ndarray | None = None) -> GateNull | None:
    """The bf16 null. `law`: "gaussian" or "sign" (plus or minus one size), scaled to the observed density; or "permuted":
    the update's own entries before rounding, given sorted as `values`, dealt out anew as they are.

    None where no entry changed, or all did.
    """
    present = np.flatnonzero(counts.every)
    every = counts.every[present].astype(np.float64)
    density = counts.num_moved / float(every.sum())
    if not 0 < density < 1:
        return None
    stay = {"gaussian": _gaussian, "sign": _sign}.get(law) or _permuted(values)
    codes = present.astype(np.uint16)
    w = from_codes(codes).astype(np.float64)
    low, high = rounding_bounds(codes)
    below, above, even = w - low, high - w, codes % 2 == 0

    def density_at(scale: float) -> float:
        return float(every @ (1 - stay(below, above, even, scale)) / every.sum())

    scale = 1.0 if law == "permuted" else _solve(density_at, density, float(above.max()))
    chance = np.zeros(NUM_CODES)
    chance[present] = 1 - stay(below, above, even, scale)
    overlaps = {name: _ratio(counts.masks[name], counts.every, chance) for name in MASKS}
    return GateNull(law, scale, density_at(scale), chance, overlaps)


def noise_sparsity(every: np.ndarray, norm: float) -> float:
    """The share of entries that i.i.d. Gaussian noise of Frobenius norm `norm` would leave as they are in bf16.

    `every`: the entries of W0 by code [65536].
    """
    present = np.flatnonzero(every)
    codes = present.astype(np.uint16)
    w = from_codes(codes).astype(np.float64)
    low, high = rounding_bounds(codes)
    stay = _gaussian(w - low, high - w, codes % 2 == 0, max(norm, 1e-300) / math.sqrt(float(every.sum())))
    return float(every[present] @ stay / every.sum())


def _ratio(mask: np.ndarray, every: np.ndarray, chance: np.ndarray) -> Expected:
    """Mean and spread of X / Y, X of the Y changed entries in the mask, entries being independent (delta method)."""
    total = float(every @ chance)
    if total == 0:
        return Expected(math.nan, math.nan)
    mean = float(mask @ chance) / total
    spread = chance * (1 - chance)
    variance = float(mask @ spread) * (1 - mean) ** 2 + float((every - mask) @ spread) * mean**2
    return Expected(mean, math.sqrt(max(variance, 0.0)) / total)


def _gaussian(below: np.ndarray, above: np.ndarray, even: np.ndarray, scale: float) -> np.ndarray:
    """P(-below < noise < above) for N(0, scale²)."""
    from scipy.special import ndtr

    return np.asarray(ndtr(above / scale) - ndtr(-below / scale))


def _sign(below: np.ndarray, above: np.ndarray, even: np.ndarray, scale: float) -> np.ndarray:
    """P(stay) where the noise is +scale or -scale; at a tie an even code stays."""
    up = np.where(even, scale <= above, scale < above)
    down = np.where(even, scale <= below, scale < below)
    return (up + 0.0 + down) / 2


def _permuted(values: np.ndarray | None) -> Stay:
    """The noise is `scale` times a random one of `values`, which are sorted."""
    if values is None or not len(values):
        raise ValueError('law "permuted": needs the sorted entries of the update as `values`')

    def stay(below: np.ndarray, above: np.ndarray, even: np.ndarray, scale: float) -> np.ndarray:
        def up_to(x: np.ndarray, inclusive: np.ndarray) -> np.ndarray:
            sides = [np.searchsorted(values, x / scale, side=side) for side in ("right", "left")]
            return np.where(inclusive, sides[0], sides[1])

        return (up_to(above, even) - up_to(-below, ~even)) / len(values)

    return stay


def _solve(density: Callable[[float], float], wanted: float, largest: float) -> float:
    """The scale at which the density is nearest to what is wanted, by bisection of its logarithm."""
    low, high = math.log(largest) - 60.0, math.log(largest) + 10.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if density(math.exp(middle)) < wanted else (low, middle)
    return min((math.exp(low), math.exp(high)), key=lambda scale: abs(density(scale) - wanted))


def permutation_null(counts: MaskCounts, mask: str, within: str) -> Expected:
    """The changed entries dealt out anew within the "matrix", the "rows" or the "columns": hypergeometric, exact."""
    size = float(counts.every.sum())
    if within == "matrix":
        lines = {"moved": np.array([float(counts.num_moved)]), mask: np.array([float(counts.masks[mask].sum())])}
    else:
        lines = counts.lines[0 if within == "rows" else 1]
        size = float(counts.shape[1 if within == "rows" else 0])
    moved, inside = lines["moved"], lines[mask]
    total = float(moved.sum())
    if total == 0:
        return Expected(math.nan, math.nan)
    variance = moved * inside * (size - inside) * (size - moved) / (size**2 * max(size - 1, 1))
    return Expected(float((moved * inside).sum()) / size / total, math.sqrt(float(variance.sum())) / total)


def subspace_null(shape: tuple[int, int], k: int) -> dict[str, float]:
    """Expected shares of ‖D‖² in random k-dimensional subspaces: k² / mn on both sides, k / m left, k / n right."""
    m, n = shape
    return {"both": k * k / (m * n), "left": k / m, "right": k / n}


def subspace_spread(shape: tuple[int, int], k: int, participation: float) -> dict[str, float]:
    """Standard deviations of those shares, exact for Haar-random subspaces, given D's (Σσ²)² / Σσ⁴.

    A random projection P of rank k in d dimensions has E[P_ij P_kl] = a δ_ij δ_kl + b (δ_ik δ_jl + δ_il δ_jk) with
    b = k (d - k) / (d (d - 1) (d + 2)) and d² a + 2 d b = k². The shares are Σ σ_i² P_ii and Σ σ_i σ_j P_ij Q_ij.
    """
    focus = 1 / participation
    (a, b), (c, d) = (_moments(size, k) for size in shape)
    squares = {
        "both": a * c + 2 * focus * (a * d + b * c) + b * d * (2 + 2 * focus),
        "left": a + 2 * b * focus,
        "right": c + 2 * d * focus,
    }
    means = subspace_null(shape, k)
    return {name: math.sqrt(max(square - means[name] ** 2, 0.0)) for name, square in squares.items()}


def _moments(d: int, k: int) -> tuple[float, float]:
    b = k * (d - k) / (d * max(d - 1, 1) * (d + 2))
    return (k * k - 2 * d * b) / d**2, b


def gate_jaccard(every: np.ndarray, a: GateNull, b: GateNull) -> float:
    """Jaccard index expected of the changed masks of two updates of one W0, each through its own gate null."""
    p, q = a.chance, b.chance
    return float(every @ (p * q) / (every @ (p + q - p * q)))
