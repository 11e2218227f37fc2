"""Singular values and leading singular vectors: exact through a float64 Gram matrix, leading ones by block Krylov.

A Gram matrix squares the condition number, which is fatal in float32 and harmless in float64: NSS of a permuted matrix,
truly 0, comes out at 3e-15 (float32 of any kind: above 1e-6). It costs a product and a tridiagonal reduction of the
short side instead of a bidiagonal one of the whole matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from statewise.geometry import tridiagonal
from statewise.geometry.checkpoints import LowRank, Weights
from statewise.stats.spectra import shift_floor

if TYPE_CHECKING:
    import torch

BLOCK = 2048  # rows or columns turned to float64 at once: 64 MiB at 4096
RELIABLE = 1e-6  # a singular vector from a Gram matrix means nothing below this share of σ_1
DIRECT = 64  # up to this short side LAPACK's whole eigenproblem is as quick
ORTHONORMAL = 1e-10
SEPARATE = 1e-6  # vectors of a tridiagonal that overlap by more are made anew by LAPACK's stemr, others by QR
SINGLE_FLOOR = 1e-3  # bound on what float32 may add to the norm of a spectrum; what it does add is a hundredth of that
NOT_FINITE = "holds NaN or infinite values"


@dataclass(frozen=True)
class Decomposition:
    """All singular values `s`, descending, and the leading vectors u [m, k], v [n, k], in float64."""

    s: np.ndarray
    u: np.ndarray
    v: np.ndarray

    @property
    def k(self) -> int:
        return self.u.shape[1]

    def leading(self, k: int) -> Decomposition:
        return Decomposition(self.s, self.u[:, :k], self.v[:, :k])


def decompose(weights: Weights, k: int, device: str = "cpu") -> Decomposition:
    """All singular values and the k leading vectors (fewer where σ_k < 1e-6 σ_1), exact in float64."""
    tall = weights.stored.shape[0] > weights.stored.shape[1]
    values, short = eigen(gram_of(weights, tall, device), k)
    s = np.sqrt(np.maximum(values, 0))
    short = short[:, : int(np.count_nonzero(s[: short.shape[1]] > RELIABLE * s[0]))] if s[0] > 0 else short[:, :0]
    short = orthonormal(short)
    long = orthonormal(other_side(weights, short / s[: short.shape[1]], tall, device))
    return Decomposition(s, long, short) if tall else Decomposition(s, short, long)


def singular_values(weights: Weights, device: str = "cpu") -> np.ndarray:
    """All singular values in float64, descending."""
    return decompose(weights, 0, device).s


def _blocks(weights: Weights, tall: bool) -> Any:
    """(low, high, float64 block) along the long side: rows of a tall matrix, columns of a wide one."""
    size = weights.stored.shape[0 if tall else 1]
    for low in range(0, size, BLOCK):
        high = min(low + BLOCK, size)
        if tall:
            yield low, high, weights.rows(low, high).double()
            continue
        part = weights.stored[:, low:high].double()
        if weights.delta is not None:
            part += weights.delta.left @ weights.delta.right[:, low:high]
        yield low, high, part


def gram_of(weights: Weights, tall: bool, device: str) -> Any:
    """The product along the long side, [p, p]: on a CPU the lower triangle of a Fortran array, on a GPU a tensor."""
    import torch
    from scipy.linalg.blas import dsyrk

    p = min(weights.stored.shape)
    if device != "cpu":
        total = torch.zeros(p, p, dtype=torch.float64, device=device)
        for _, _, part in _blocks(weights, tall):
            part = part.to(device)
            total += part.T @ part if tall else part @ part.T
        return total
    gram = np.zeros((p, p), order="F")
    for _, _, part in _blocks(weights, tall):
        # A row-major block is its transpose in Fortran order, so that nothing is copied.
        gram = dsyrk(1.0, part.numpy().T, beta=1.0, c=gram, trans=0 if tall else 1, lower=1, overwrite_c=1)
    return gram


def eigen(gram: Any, k: int) -> tuple[np.ndarray, np.ndarray]:
    """All eigenvalues, descending, and the k leading eigenvectors [p, k] of a symmetric matrix, which is overwritten.

    For some vectors: LAPACK's reduction to a tridiagonal, its values, the vectors asked for, turned back. Raises
    ArithmeticError where the matrix is not finite.
    """
    p = gram.shape[0]
    k = min(k, p)
    if k == 0:
        return _values(gram), np.zeros((p, 0))
    if not isinstance(gram, np.ndarray):
        import torch

        values, vectors = torch.linalg.eigh(gram)
        return values.flip(0).cpu().numpy(), vectors[:, p - k :].flip(1).cpu().numpy()
    if p <= DIRECT:
        values, vectors = np.linalg.eigh(gram)  # reads the lower triangle
        return values[::-1], vectors[:, ::-1][:, :k]
    from scipy.linalg import lapack

    size, _ = lapack.dsytrd_lwork(p, lower=1)
    reflectors, diagonal, beside, tau, _ = lapack.dsytrd(gram, lower=1, lwork=int(size), overwrite_a=1)
    values, failed = lapack.dsterf(diagonal, beside)
    if failed:
        raise ArithmeticError(NOT_FINITE)
    vectors = _tridiagonal_vectors(diagonal, beside, values[p - k :])
    turned = _turned_back(reflectors, tau, vectors)
    del gram, reflectors
    return values[::-1], np.ascontiguousarray(np.vstack([vectors[:1], turned])[:, ::-1])


def _values(gram: Any) -> np.ndarray:
    """All eigenvalues, descending; by torch, whose reduction is the quicker one."""
    import torch

    # The lower triangle of a Fortran array is the upper one of its transpose, which torch can read in place.
    tensor = torch.from_numpy(gram.T) if isinstance(gram, np.ndarray) else gram
    try:
        return torch.linalg.eigvalsh(tensor, UPLO="U").flip(0).cpu().numpy()
    except RuntimeError:
        raise ArithmeticError(NOT_FINITE) from None


def _tridiagonal_vectors(diagonal: np.ndarray, beside: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Of its largest eigenvalues, ascending as they are."""
    found = tridiagonal.vectors(diagonal, beside, values)
    if overlap(found) < SEPARATE:  # false for NaN too
        return found
    from scipy.linalg import eigh_tridiagonal

    p = len(diagonal)
    return np.asarray(eigh_tridiagonal(diagonal, beside, select="i", select_range=(p - len(values), p - 1))[1])


def _turned_back(reflectors: np.ndarray, tau: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Q z for the Q of the reduction, without the first coordinate, which it leaves alone."""
    from scipy.linalg import lapack

    p = len(vectors)
    # Columns without their first entry: a view that starts one entry later and whose last row is not read.
    lower = reflectors.reshape(-1, order="F")[1 : 1 + p * (p - 1)].reshape(p, p - 1, order="F")
    rest = np.asfortranarray(vectors[1:])
    _, work, _ = lapack.dormqr("L", "N", lower, tau, rest, -1)
    turned, _, _ = lapack.dormqr("L", "N", lower, tau, rest, int(work[0]), overwrite_c=1)
    return np.asarray(turned)


def update_values(delta: torch.Tensor, device: str = "cpu") -> np.ndarray:
    """All singular values of an update [m, n] in float32: by a float32 Gram matrix, or a float64 one where that is too coarse.

    Good to eps σ_1² / σ_i: the sums made of them (ranks, norms) to about 1e-5, a value below 1e-3 σ_1 only to its size.
    """
    import torch

    if min(delta.shape) > DIRECT:
        values = torch.from_numpy(_values(_single_gram(delta, device))).double().clamp_min(0).sqrt().numpy()
        if shift_floor(values, float(np.finfo(np.float32).eps)) < SINGLE_FLOOR:
            return values
    return singular_values(Weights(delta), device)


def _single_gram(delta: torch.Tensor, device: str) -> Any:
    from scipy.linalg.blas import ssyrk

    tall = delta.shape[0] > delta.shape[1]
    if device != "cpu":
        delta = delta.to(device)
        return delta.T @ delta if tall else delta @ delta.T
    return ssyrk(1.0, delta.numpy().T, trans=0 if tall else 1, lower=1)


def other_side(weights: Weights, scaled: np.ndarray, tall: bool, device: str, dtype: Any = np.float64) -> np.ndarray:
    """The vectors of the long side from u / σ (v / σ for a tall matrix): W^T u / σ, or W v / σ."""
    import torch

    long = np.empty((max(weights.stored.shape), scaled.shape[1]), dtype=dtype)
    factors: Any = np.ascontiguousarray(scaled)
    if device != "cpu":
        factors = torch.from_numpy(factors).to(device)
    for low, high, part in _blocks(weights, tall):
        part = part.numpy() if device == "cpu" else part.to(device)
        found = (part if tall else part.T) @ factors
        long[low:high] = found if device == "cpu" else found.cpu().numpy()
    return long


def overlap(columns: np.ndarray) -> float:
    """The largest entry of |C^T C - 1|; one array of that size, since all vectors of a large matrix may be asked for."""
    product = columns.T @ columns
    product[np.diag_indices_from(product)] -= 1
    return float(np.abs(product, out=product).max())


def orthonormal(columns: np.ndarray) -> np.ndarray:
    """The columns, by QR where they are not orthonormal to 1e-10 already."""
    k = columns.shape[1]
    if k and overlap(columns) > ORTHONORMAL:
        q, r = np.linalg.qr(columns)
        return q * np.sign(np.diag(r))
    return columns


def factored(delta: LowRank) -> Decomposition:
    """The exact decomposition of left @ right from its r x r core."""
    import torch

    (ql, rl), (qr, rr) = torch.linalg.qr(delta.left), torch.linalg.qr(delta.right.T)
    u, s, vt = torch.linalg.svd(rl @ rr.T)
    size = min(delta.left.shape[0], delta.right.shape[1])
    values = np.zeros(size)
    values[: len(s)] = s.numpy()
    return Decomposition(values, (ql @ u).numpy(), (qr @ vt.T).numpy())
