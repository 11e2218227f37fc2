"""bfloat16 codes: which entries of a pair of tensors differ once both are stored in bf16.

A code is the 16 bits of a bf16 number as uint16. Comparing codes is exact and needs no tolerance: the smallest relative
gap of two bf16 numbers is 2^-8, so |w+ - w0| <= eta max(|w0|, |w+|) gives the same mask for every 0 <= eta < 2^-8.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

MAGNITUDE = np.uint16(0x7FFF)
INFINITY = np.uint16(0x7F80)
NUM_CODES = 1 << 16


def to_codes(values: torch.Tensor) -> np.ndarray:
    """Codes of any floating tensor, rounded to nearest, ties to even, where it is not bf16 already."""
    import torch

    return values.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)


def from_codes(codes: np.ndarray) -> np.ndarray:
    """The float32 values of codes."""
    return (codes.astype(np.uint32) << 16).view(np.float32)


def changed(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Where the stored value differs. +0 equals -0; NaN equals nothing, itself included."""
    mask = before != after
    zeros = mask & (((before | after) & MAGNITUDE) == 0)
    if zeros.any():
        mask &= ~zeros
    nan = is_nan(before) | is_nan(after)
    return mask | nan if nan.any() else mask


def is_nan(codes: np.ndarray) -> np.ndarray:
    return (codes & MAGNITUDE) > INFINITY


def order(codes: np.ndarray) -> np.ndarray:
    """int32 that counts bf16 numbers from 0 in the order of their values: neighbours differ by 1."""
    magnitude = (codes & MAGNITUDE).astype(np.int32)
    return np.where(codes > MAGNITUDE, -magnitude, magnitude)


def ulp_distance(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """How many bf16 numbers apart two codes are."""
    return np.abs(order(after) - order(before))


def rounding_bounds(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) in float64: what lies between rounds to the code; a bound itself does where the code is even."""
    values = from_codes(codes).astype(np.float64)
    index = order(codes)
    low, high = (_midpoint(index, values, step) for step in (-1, 1))
    return low, high


def _midpoint(index: np.ndarray, values: np.ndarray, step: int) -> np.ndarray:
    neighbour = index + step
    codes = np.where(neighbour < 0, -neighbour | 0x8000, neighbour).astype(np.uint16)
    return (values + from_codes(codes).astype(np.float64)) / 2


@dataclass
class Support:
    """Counts over a pair of matrices, added up block by block; `rows` and `columns` are changed entries in each."""

    shape: tuple[int, int]
    changed: int = 0
    nan: int = 0
    sign_flips: int = 0
    within_tolerance: int = 0  # |w+ - w0| <= tolerance, the rule that the code comparison replaces
    largest_ulp: int = 0
    one_ulp: int = 0
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    columns: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        self.rows, self.columns = (np.zeros(size, dtype=np.int64) for size in self.shape)

    def add(self, start: int, before: np.ndarray, after: np.ndarray, tolerance: float) -> np.ndarray:
        """Count rows start, start + 1 ... given as codes [rows, columns]; returns their changed mask."""
        mask = changed(before, after)
        nan = is_nan(before) | is_nan(after)
        self.nan += int(np.count_nonzero(nan))
        self.rows[start : start + len(before)] = np.count_nonzero(mask, axis=1)
        self.columns += np.count_nonzero(mask, axis=0)
        self.changed += int(np.count_nonzero(mask))
        old, new = before[mask & ~nan], after[mask & ~nan]  # an unchanged entry is within every tolerance
        steps = ulp_distance(old, new)
        self.one_ulp += int(np.count_nonzero(steps == 1))
        self.largest_ulp = max(self.largest_ulp, int(steps.max(initial=0)))
        self.sign_flips += int(np.count_nonzero(((old ^ new) & 0x8000) != 0))
        large = np.abs(from_codes(new) - from_codes(old)) > tolerance
        self.within_tolerance += mask.size - int(np.count_nonzero(nan)) - int(np.count_nonzero(large))
        return mask

    @property
    def entries(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def density(self) -> float:
        return self.changed / self.entries

    def heads(self, axis: int, size: int) -> np.ndarray:
        """Changed share of each head: `size` consecutive rows (axis 0) or columns (axis 1)."""
        counts = (self.rows, self.columns)[axis]
        return counts.reshape(-1, size).sum(axis=1) / (size * self.shape[1 - axis])


def dispersion(counts: np.ndarray, size: int) -> float:
    """Variance of counts out of `size` over that of independent entries of the same density: 1 without stripes.

    nan where nothing, or everything, changed.
    """
    share = counts.sum() / (len(counts) * size)
    expected = size * share * (1 - share)
    return float(counts.var(ddof=1) / expected) if expected > 0 and len(counts) > 1 else float("nan")
