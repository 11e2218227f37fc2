"""Whether the subspace of an update settles before the update does, and what a sum of parts shows by itself.

D_t = Δ_1 + ... + Δ_t shares its past with the end D_T, so Sim_K(D_t, D_T) rises to 1 whatever the training does. Two nulls
show how much of a curve that is:

    shuffled    partial sums of the same Δ in random order: what any part of the whole gives, without the order in time
    unrelated   the columns of every Δ_i moved and flipped at random first (norms and singular values stay, directions are
                lost): what a common past gives to steps that have nothing to do with each other
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from statewise.geometry.checkpoints import Weights
from statewise.geometry.krylov import leading
from statewise.geometry.spectrum import decompose
from statewise.stats.spectra import subspace_similarity

if TYPE_CHECKING:
    import torch


def directions(delta: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(σ, V): the k largest singular values or more, descending, and their right vectors [n, k].

    By certified iteration, else from the whole decomposition; fewer vectors where the matrix has fewer directions.
    """
    found = leading(delta, k)
    if found.certified:
        return found.s, found.v
    whole = decompose(Weights(delta), k)
    return whole.s, whole.v.astype(np.float32)


def lock_index(curve: Sequence[float], threshold: float) -> int | None:
    """The first i from which on the curve stays at the threshold or above it; None where its last value is below."""
    below = [i for i, value in enumerate(curve) if not value >= threshold]
    first = below[-1] + 1 if below else 0
    return first if first < len(curve) else None


def similarities(parts: Sequence[torch.Tensor], k: int) -> list[float]:
    """Sim_K of every partial sum of `parts` [m, n] with the whole sum, by right singular vectors; the last is 1."""
    bases = [directions(total, k)[1] for total in partial_sums(parts)]
    return [subspace_similarity(basis, bases[-1]) for basis in bases]


def partial_sums(parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Δ_1, Δ_1 + Δ_2, ..., summed in float64, as float32."""
    total = parts[0].double() * 0
    for part in parts:
        total = total + part.double()
        yield total.float()


def shuffled(parts: Sequence[torch.Tensor], k: int, random: np.random.Generator) -> list[float]:
    """`similarities` of the parts in a random order."""
    return similarities([parts[i] for i in random.permutation(len(parts))], k)


def unrelated(parts: Sequence[torch.Tensor], k: int, random: np.random.Generator) -> list[float]:
    """`similarities` of parts whose columns were permuted and flipped, each in its own way."""
    import torch

    turned = []
    for part in parts:
        columns = part.shape[1]
        order = torch.from_numpy(random.permutation(columns))
        signs = torch.from_numpy(random.integers(0, 2, columns) * 2.0 - 1).to(part.dtype)
        turned.append(part[:, order] * signs)
    return similarities(turned, k)
