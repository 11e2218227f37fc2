"""How far the leading singular subspaces turned: exactly, or to first order from a known decomposition of W0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from statewise.geometry.spectrum import Decomposition
from statewise.stats.spectra import angle_summary, principal_angles, relative_gap, widest_gap

if TYPE_CHECKING:
    import torch

    from statewise.geometry.cache import Known

COLUMNS = 1024  # of D V held at once


@dataclass(frozen=True)
class FirstOrder:
    """Singular values after the update, and angles in degrees, descending, of the left and the right subspaces."""

    s: np.ndarray
    left: np.ndarray
    right: np.ndarray


def exact_angles(before: Decomposition, after: Decomposition, k: int) -> dict[str, np.ndarray]:
    """Angles in degrees, descending, between the k leading left ("u") and right ("v") singular vectors."""
    return {
        "u": principal_angles(before.u[:, :k], after.u[:, :k]),
        "v": principal_angles(before.v[:, :k], after.v[:, :k]),
    }


def describe(s: np.ndarray, k: int, angles: dict[str, np.ndarray]) -> dict[str, Any]:
    """max, mean, median, p90 and the curve of each side, k, and the relative gap of W0 at k."""
    row: dict[str, Any] = {"angle_k": k, "angle_gap": relative_gap(s, k)}
    for side, values in angles.items():
        row |= {f"angle_{side}_{name}": value for name, value in angle_summary(values).items()}
        row[f"angles_{side}"] = values.tolist()
    return row


def wide_gap_k(s: np.ndarray, k: int) -> int:
    """The k between three quarters of k and k at which the gap is widest: the last few vectors of a subspace that ends in
    near-equal singular values turn freely, and the largest angle then tells of that and not of the update.
    """
    return widest_gap(s, max(1, 3 * k // 4), k)


def first_order(known: Known, delta: torch.Tensor, k: int) -> FirstOrder:
    """With E = U^T D V:  ds_i = E_ii, and the angles are those of
    R_ij = (s_j E_ij + s_i E_ji) / (s_j² - s_i²) on the left, Q_ij = (s_i E_ij + s_j E_ji) / (s_j² - s_i²) on the right,
    i > k >= j, with what D turns out of the span of the short side added to the long one.
    """
    u, v, s = known.u.numpy(), known.v.numpy(), known.s[: known.u.shape[1]]
    d, size = delta.numpy(), max(COLUMNS, k)
    diagonal, beside = [], []
    side = d[:, :0]
    for low in range(0, len(s), size):
        part = d @ v[:, low : low + size]
        side = part[:, :k].copy() if low == 0 else side
        beside.append(u[:, :k].T @ part)
        diagonal.append((u[:, low : low + size] * part).sum(axis=0, dtype=np.float64))
    columns, rows = (u.T @ side).astype(np.float64), np.concatenate(beside, axis=1).astype(np.float64)
    tall, wide = (basis.shape[0] > len(s) for basis in (u, v))
    outside = {
        "left": _outside(side.T, columns.T) if tall else None,
        "right": _outside(u[:, :k].T @ d, rows) if wide else None,
    }
    left, right = _turns(s, columns[k:], rows[:, k:].T, outside, k)
    after = np.sort(np.abs(s + np.concatenate(diagonal)))[::-1]
    return FirstOrder(np.concatenate([after, known.s[len(s) :]]), left, right)


def _outside(products: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """The Gram matrix [k, k] of what lies outside the known vectors: all of it less what lies within."""
    whole = products.astype(np.float64)
    return np.asarray(whole @ whole.T - inside @ inside.T)


def _turns(
    s: np.ndarray, below: np.ndarray, beside: np.ndarray, outside: dict[str, np.ndarray | None], k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Angles of both sides from E_ij (`below` [p - k, k]) and E_ji (`beside`, transposed to the same shape)."""
    lead, rest = s[None, :k], s[k:, None]
    apart = np.maximum(lead**2 - rest**2, np.finfo(float).tiny)
    turns = {"left": (lead * below + rest * beside) / apart, "right": (rest * below + lead * beside) / apart}
    found = []
    for name, turn in turns.items():
        gram = turn.T @ turn
        extra = outside[name]
        if extra is not None:
            gram += extra / np.outer(s[:k], s[:k])
        found.append(np.degrees(np.arctan(np.sqrt(np.maximum(np.linalg.eigvalsh(gram)[::-1], 0)))))
    return found[0], found[1]


def noise_angles(
    s: np.ndarray, shape: tuple[int, int], norm: float, k: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """First-order angles (left, right) that i.i.d. Gaussian D of Frobenius norm `norm` would make.

    U^T D V is i.i.d. Gaussian too, whatever U and V, so that W0's singular values are all that is needed.
    """
    p, longest = min(shape), max(shape)
    sd = norm / np.sqrt(shape[0] * shape[1])
    random = np.random.default_rng(seed)
    below, beside = (sd * random.standard_normal((p - k, k)) for _ in range(2))
    outside: dict[str, np.ndarray | None] = {"left": None, "right": None}
    if longest > p:
        beyond = sd * random.standard_normal((longest - p, k))
        outside["left" if shape[0] > p else "right"] = beyond.T @ beyond
    return _turns(s, below, beside, outside, k)
