"""Numbers made of singular values and of principal angles. Pure functions of vectors; NumPy only.

`s` is a vector of singular values in descending order. `total` is the squared Frobenius norm Σ σ² of the matrix, needed
where `s` holds only its leading part.
"""

from __future__ import annotations

import math

import numpy as np


def stable_rank(s: np.ndarray, total: float | None = None) -> float:
    """Σ σ² / σ_1²; nan for a zero matrix. Between 1 and the rank, the same for c D."""
    s = _values(s)
    return _ratio(_energy(s, total), float(s[0]) ** 2)


def effective_rank(s: np.ndarray, power: int) -> float:
    """exp(-Σ p ln p) with p = σ^power / Σ σ^power, over *all* singular values.

    power 1: Roy and Vetterli 2007 ("effective_rank"); power 2: of the energy ("effective_rank_energy").
    """
    shares = _values(s) ** power
    if shares.sum() <= 0:
        return math.nan
    shares = shares[shares > 0] / shares.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def participation(s: np.ndarray, power: int) -> float:
    """(Σ σ^power)² / Σ σ^(2 power), over *all* singular values: power 2 of energies, power 1 (nuclear / Frobenius)²."""
    values = _values(s) ** power
    return _ratio(float(values.sum()) ** 2, float((values**2).sum()))


def top_energy(s: np.ndarray, k: int, total: float | None = None) -> float:
    """Σ_{i<=k} σ_i² / Σ σ²: the share of the squared norm in the k leading directions."""
    s = _values(s)
    return _ratio(float((s[:k] ** 2).sum()), _energy(s, total))


def hill(s: np.ndarray, k: int) -> float:
    """[1/(k-1) Σ_{i<k} ln(σ_i / σ_k)]^-1 over the k largest singular values (not eigenvalues: those give half of it).

    nan where σ_k is 0 or all k are equal. Raises ValueError unless 2 <= k <= len(s).
    """
    s = _values(s)
    if not 2 <= k <= len(s):
        raise ValueError(f"hill: k is {k}, expected 2 to {len(s)} (the number of singular values given)")
    if s[k - 1] <= 0:
        return math.nan
    return _ratio(1.0, float(np.log(s[: k - 1] / s[k - 1]).mean()))


def hill_curve(s: np.ndarray, ks: list[int]) -> list[float]:
    """`hill` at every k of `ks` that the vector allows; nan at the others."""
    return [hill(s, k) if 2 <= k <= len(s) else math.nan for k in ks]


def spectral_shift(before: np.ndarray, after: np.ndarray) -> float:
    """NSS = ‖s(W+) - s(W0)‖ / ‖s(W0)‖ over all singular values; at most ‖D‖_F / ‖W0‖_F (Mirsky)."""
    return _ratio(float(np.linalg.norm(after - before)), float(np.linalg.norm(before)))


def shift_floor(before: np.ndarray, eps: float = float(np.finfo(np.float64).eps)) -> float:
    """What rounding alone may add to NSS: eigenvalues of a Gram matrix are good to eps σ_1², so σ to eps σ_1² / 2σ."""
    s = _values(before)
    if not s.size or s[0] <= 0:
        return math.nan
    errors = eps * s[0] ** 2 / np.maximum(2 * s, math.sqrt(eps) * s[0])
    return float(np.linalg.norm(errors) / np.linalg.norm(s))


def drift_ratio(before: np.ndarray, after: np.ndarray, delta_norm: float) -> float:
    """‖s(W+) - s(W0)‖ / ‖D‖_F in [0, 1]: how much of the update shows in the spectrum."""
    return _ratio(float(np.linalg.norm(after - before)), delta_norm)


def subspace_similarity(a: np.ndarray, b: np.ndarray) -> float:
    """Sim_K = ‖A^T B‖_F² / K for orthonormal columns A, B [n, K]: mean cos² of the angles. Random subspaces: K / n."""
    return float(((a.T @ b) ** 2).sum() / a.shape[1]) if a.shape[1] else math.nan


def principal_angles(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Angles in degrees, descending, between the spans of orthonormal columns A, B [n, K] in float64.

    Sines are singular values of (I - A A^T) B, cosines of A^T B; the sine is used below 45 degrees, where the cosine is
    flat (arccos in float32 returns up to 0.06 degrees for an angle of 0.001), the cosine above.
    """
    inner = a.T @ b
    sines = _small_values(b - a @ inner)
    angles = np.arcsin(np.minimum(sines, 1))
    wide = sines > math.sqrt(0.5)
    if wide.any():
        angles[wide] = np.arccos(np.minimum(_small_values(inner)[::-1][wide], 1))
    return np.degrees(angles)


def _small_values(matrix: np.ndarray) -> np.ndarray:
    """Singular values of [n, K], K <= n, descending, good to 1e-8 of the largest."""
    return np.sqrt(np.maximum(np.linalg.eigvalsh(matrix.T @ matrix)[::-1], 0))


def angle_summary(angles: np.ndarray) -> dict[str, float]:
    """max, mean, median and p90 of a vector, as given."""
    if not angles.size:
        return dict.fromkeys(("max", "mean", "median", "p90"), math.nan)
    low, high = np.quantile(angles, [0.5, 0.9])
    return {"max": float(angles.max()), "mean": float(angles.mean()), "median": float(low), "p90": float(high)}


def relative_gap(s: np.ndarray, k: int) -> float:
    """(σ_k - σ_{k+1}) / σ_k; 1 where there is no further singular value."""
    s = _values(s)
    following = float(s[k]) if k < len(s) else 0.0
    return _ratio(float(s[k - 1]) - following, float(s[k - 1]))


def widest_gap(s: np.ndarray, low: int, high: int) -> int:
    """The k in [low, high] with the largest relative gap: where the leading subspace is best defined."""
    return max(range(low, high + 1), key=lambda k: (relative_gap(s, k), -k))


def _values(s: np.ndarray) -> np.ndarray:
    return np.asarray(s, dtype=np.float64)


def _energy(s: np.ndarray, total: float | None) -> float:
    return float((s**2).sum()) if total is None else total


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else math.nan
