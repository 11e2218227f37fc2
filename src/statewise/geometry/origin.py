"""The choices of a comparison, the start weights of a matrix, and the update D = W+ - W0."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from statewise.errors import RecipeError, nearest
from statewise.geometry import codes, krylov, masks, spectrum
from statewise.geometry.checkpoints import LowRank, Weights

if TYPE_CHECKING:
    import torch

    from statewise.geometry.cache import Known
    from statewise.geometry.matrices import Matrix

TIERS = ("support", "update", "spectrum", "angles", "masks")
ENERGIES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Settings:
    """`top`: K, the leading triplets of D; `hill_k`; `angle_k`: at most half the short side; `rank`, `alpha`: of the principal
    mask, the rank at most a quarter of the short side; `values`: "stored", or "bf16" to round everything first;
    `same_norm`: measure every end where its course first had the norm of the smallest update.
    """

    tiers: tuple[str, ...] = ("support", "update")
    tolerance: float = 1e-5
    top: int = 16
    hill_k: int = 16
    angle_k: int = 512
    rank: int = 64
    alpha: float = 0.3
    values: str = "stored"
    same_norm: bool = False
    cache: str | None = None
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, known in (("tier", self.tiers, TIERS), ("values", (self.values,), ("stored", "bf16"))):
            wrong = [v for v in value if v not in known]
            if wrong:
                raise RecipeError(f"--{name}: received '{wrong[0]}'{nearest(wrong[0], known)}")

    def has(self, *tiers: str) -> bool:
        return any(tier in self.tiers for tier in tiers)


class Origin:
    """The start weights of a matrix, and what several checkpoints need of them, computed once."""

    def __init__(self, matrix: Matrix, before: Weights, settings: Settings):
        self.matrix, self.settings = matrix, settings
        self.before = rounded(before) if settings.values == "bf16" else before

    @property
    def short(self) -> int:
        return min(self.matrix.shape)

    @property
    def angle_k(self) -> int:
        return min(self.settings.angle_k, self.short // 2)

    @property
    def rank(self) -> int:
        return max(1, min(self.settings.rank, self.short // 4))

    @cached_property
    def codes(self) -> np.ndarray:
        return bf16_codes(self.before)

    @cached_property
    def counts(self) -> np.ndarray:
        """Entries by code [65536]."""
        return masks.count_codes(self.codes)

    @cached_property
    def known(self) -> Known | None:
        """From the cache, where there is one."""
        from statewise.geometry.cache import Cache

        settings = self.settings
        k = max(self.angle_k, self.rank)
        return Cache(settings.cache).get(self.before, k, settings.device) if settings.cache else None

    @cached_property
    def decomposition(self) -> spectrum.Decomposition:
        """With as many vectors as the tiers need."""
        k = max(self.angle_k if self.settings.has("angles") else 0, self.rank if self.settings.has("masks") else 0)
        if self.known is not None:
            return self.known.decomposition(k)
        return spectrum.decompose(self.before, k, self.settings.device)

    @cached_property
    def leading(self) -> spectrum.Decomposition:
        """The vectors of the principal mask: by Krylov where nothing else needs a decomposition and it can be certified."""
        if self.settings.cache or self.settings.has("spectrum", "angles"):
            return self.decomposition.leading(self.rank)
        found = krylov.leading(self.before.rows().float(), self.rank, self.settings.seed, max_blocks=12)
        if found.certified:
            return spectrum.Decomposition(found.s, found.u, found.v)
        return self.decomposition.leading(self.rank)

    @cached_property
    def principal(self) -> masks.PrincipalMask:
        lead = self.leading
        return masks.PrincipalMask.largest(lead.u, lead.s[: lead.k], lead.v, self.settings.alpha)


@dataclass(frozen=True)
class Delta:
    """D as float32, exact for bf16 pairs; `factored` where an adapter gives it as a product. `norm` in float64."""

    dense: torch.Tensor
    norm: float
    factored: spectrum.Decomposition | None

    @classmethod
    def of(cls, before: Weights, after: Weights) -> Delta:
        import torch

        if _is_product(before, after):
            assert after.delta is not None
            factored = spectrum.factored(after.delta)
            dense = (after.delta.left @ after.delta.right).float()
            return cls(dense, float(np.linalg.norm(factored.s)), factored)
        dense = torch.empty(before.stored.shape, dtype=torch.float32)
        square = 0.0
        for low, high in masks.row_blocks((dense.shape[0], dense.shape[1])):
            part = after.rows(low, high).double() - before.rows(low, high).double()
            dense[low:high] = part
            square += float(part.square().sum())
        return cls(dense, math.sqrt(square), None)


def towards(before: Weights, after: Weights, share: float) -> Weights:
    """W0 + share (W+ - W0) in float64; an adapter's change stays a product."""
    if share == 1:
        return after
    if _is_product(before, after):
        assert after.delta is not None
        return Weights(after.stored, LowRank(share * after.delta.left, after.delta.right))
    old = before.rows().double()
    return Weights(old + share * (after.rows().double() - old))


def _is_product(before: Weights, after: Weights) -> bool:
    import torch

    return after.delta is not None and before.delta is None and torch.equal(before.stored, after.stored)


def rounded(weights: Weights) -> Weights:
    """The values rounded to bf16."""
    import torch

    return Weights(weights.rows().to(torch.bfloat16))


def bf16_codes(weights: Weights) -> np.ndarray:
    """Codes of the values, by blocks of rows: an adapter's float64 sum is never held whole."""
    shape = (weights.stored.shape[0], weights.stored.shape[1])
    if weights.delta is None:
        return codes.to_codes(weights.stored)
    return np.concatenate([codes.to_codes(weights.rows(low, high)) for low, high in masks.row_blocks(shape)])
