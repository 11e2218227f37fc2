"""Eigenvectors of tridiagonals against LAPACK's, and what is done where eigenvalues lie together."""

import numpy as np
import pytest

from statewise.geometry import tridiagonal
from statewise.geometry.spectrum import _tridiagonal_vectors


def dense(diagonal: np.ndarray, beside: np.ndarray) -> np.ndarray:
    return np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)


@pytest.mark.parametrize("p", [2, 3, 70, 301])
@pytest.mark.parametrize("grade", [0.0, 6.0])
def test_vectors(p: int, grade: float) -> None:
    random = np.random.default_rng(p)
    scale = 10 ** np.linspace(0, -grade, p)
    diagonal, beside = random.standard_normal(p) * scale, random.standard_normal(p - 1) * scale[1:]
    values, expected = np.linalg.eigh(dense(diagonal, beside))
    k = (p + 1) // 2
    found = tridiagonal.vectors(diagonal, beside, values[-k:])
    assert np.abs(dense(diagonal, beside) @ found - found * values[-k:]).max() < 1e-13 * np.abs(values).max()
    assert np.abs(np.abs((found * expected[:, -k:]).sum(axis=0)) - 1).max() < 1e-9
    if grade == 0:  # a value that is none gives a vector that is none
        shifted = tridiagonal.vectors(diagonal, beside, values[-k:] + 1e-3)
        assert np.abs(dense(diagonal, beside) @ shifted - shifted * values[-k:]).max() > 1e-6


def test_equal_eigenvalues_are_kept_apart_by_lapack() -> None:
    """Wilkinson's W21+ has pairs that differ by 1e-14: the vectors of such a pair are not orthogonal."""
    diagonal, beside = np.abs(np.arange(-10, 11)).astype(float), np.ones(20)
    values = np.linalg.eigvalsh(dense(diagonal, beside))
    alone = tridiagonal.vectors(diagonal, beside, values[-6:])
    assert np.abs(alone.T @ alone - np.eye(6)).max() > 1e-3
    found = _tridiagonal_vectors(diagonal, beside, values[-6:])
    assert np.abs(found.T @ found - np.eye(6)).max() < 1e-12
    assert np.abs(dense(diagonal, beside) @ found - found * values[-6:]).max() < 1e-13


def test_a_matrix_in_parts() -> None:
    diagonal, beside = np.arange(70.0), np.zeros(69)
    found = _tridiagonal_vectors(diagonal, beside, diagonal[-3:])
    assert np.abs(found) == pytest.approx(np.eye(70)[:, -3:])
