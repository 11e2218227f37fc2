"""Masks over the entries of W0 and how the changed entries lie on them.

    principal  the share alpha of entries that are largest in the rank-r part of W0
    low        the share alpha of entries that are smallest in W0
    overlap(M) = |M and changed| / |changed|;  enrichment = overlap / density of M

bf16 weights tie massively, so a threshold takes too many or too few entries. Ties at the threshold of the low mask count
with the one weight that makes its density exactly alpha: what splitting the tie at random gives on average.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from statewise.geometry.codes import MAGNITUDE, NUM_CODES

if TYPE_CHECKING:
    import torch

MASKS = ("principal", "low", "principal_not_low", "low_or_not_principal")
NUM_MAGNITUDES = NUM_CODES // 2
BLOCK_ENTRIES = 1 << 21


def row_blocks(shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """(low, high) rows with about two million entries each, which the processor's caches can hold."""
    size = max(1, BLOCK_ENTRIES // shape[1])
    for low in range(0, shape[0], size):
        yield low, min(low + size, shape[0])


def count_codes(codes: np.ndarray) -> np.ndarray:
    """Entries by code [65536]."""
    counts = np.zeros(NUM_CODES, dtype=np.int64)
    for low, high in row_blocks((codes.shape[0], codes.shape[1])):
        counts += np.bincount(codes[low:high].ravel(), minlength=NUM_CODES)
    return counts


def low_weights(every: np.ndarray, alpha: float) -> tuple[np.ndarray, float]:
    """Weight of each magnitude code [32768] in the low mask, and the share of entries that tie at its threshold.

    `every`: the entries by code [65536].
    """
    counts = every[:NUM_MAGNITUDES] + every[NUM_MAGNITUDES:]
    size = int(counts.sum())
    wanted = alpha * size
    below = np.cumsum(counts) - counts
    room = np.maximum(counts, 1)
    weights = np.clip((wanted - below) / room, 0.0, 1.0)
    at = int(np.searchsorted(np.cumsum(counts), wanted))
    return weights, float(counts[min(at, NUM_MAGNITUDES - 1)] / size)


@dataclass(frozen=True)
class PrincipalMask:
    """Entries whose |left @ right| is at least `threshold`: the share alpha of largest ones."""

    left: np.ndarray
    right: np.ndarray
    threshold: float

    @classmethod
    def largest(cls, u: np.ndarray, s: np.ndarray, v: np.ndarray, alpha: float) -> PrincipalMask:
        """From the rank-r factors u [m, r], s [r], v [n, r] of W0; the threshold is the exact quantile in float32."""
        left, right = (np.ascontiguousarray(side, dtype=np.float32) for side in (u * s, v.T))
        part = cls(left, right, 0.0)
        count = round(alpha * u.shape[0] * v.shape[0])
        return cls(left, right, part._kth_largest(max(count, 1)))

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.right.shape[1]

    def magnitudes(self, low: int, high: int) -> np.ndarray:
        """|W0^(r)| of some rows, float32."""
        return np.abs(self.left[low:high] @ self.right)

    def rows(self, low: int, high: int) -> np.ndarray:
        return self.magnitudes(low, high) >= self.threshold

    def _kth_largest(self, k: int) -> float:
        """By a histogram of the upper 16 bits and a sort of one bin: the matrix is made twice and never held whole."""
        counts = np.zeros(NUM_CODES, dtype=np.int64)
        for low, high in row_blocks(self.shape):
            counts += np.bincount(_upper(self.magnitudes(low, high)).ravel(), minlength=NUM_CODES)
        from_top = np.cumsum(counts[::-1])[::-1]
        bin_ = int(np.flatnonzero(from_top >= k)[-1])
        above = int(from_top[bin_] - counts[bin_])
        inside = [m[_upper(m) == bin_] for m in (self.magnitudes(*b) for b in row_blocks(self.shape))]
        return float(np.sort(np.concatenate(inside))[::-1][k - above - 1])


def _upper(values: np.ndarray) -> np.ndarray:
    """The upper 16 bits of non-negative float32, which are in the order of the values."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class MaskCounts:
    """What every overlap and null is made of.

    `every`, `moved`: entries, and changed entries, by bf16 code of W0 [65536]. `masks`, `masks_moved`: the same within
    each mask. `lines`: of axis 0 (rows) and 1 (columns), the changed entries and those of each mask, in each line.
    """

    every: np.ndarray
    moved: np.ndarray
    masks: dict[str, np.ndarray]
    masks_moved: dict[str, np.ndarray]
    lines: tuple[dict[str, np.ndarray], dict[str, np.ndarray]]
    shape: tuple[int, int]
    ties: float

    @property
    def num_moved(self) -> int:
        return int(self.moved.sum())

    def density(self, mask: str) -> float:
        return float(self.masks[mask].sum() / self.every.sum())

    def overlap(self, mask: str) -> float:
        """|mask and changed| / |changed|; nan where nothing changed."""
        return float(self.masks_moved[mask].sum() / self.num_moved) if self.num_moved else float("nan")


def count_masks(
    codes: np.ndarray, every: np.ndarray, moved: np.ndarray, principal: PrincipalMask, alpha: float
) -> MaskCounts:
    """`codes` of W0 and the changed mask, both [m, n]; `every`: `count_codes(codes)`."""
    weights, ties = low_weights(every, alpha)
    weights = weights.astype(np.float32)
    table = np.zeros((4, NUM_CODES), dtype=np.int64)
    lines = [{name: np.zeros(size) for name in ("moved", "principal", "low", "both")} for size in codes.shape]
    for low, high in row_blocks(codes.shape):
        part, change, main = codes[low:high], moved[low:high], principal.rows(low, high)
        kind = part + (change + 2 * main.astype(np.int32)) * NUM_CODES
        table += np.bincount(kind.ravel(), minlength=4 * NUM_CODES).reshape(4, NUM_CODES)
        small = weights[part & MAGNITUDE]
        for name, values in (("moved", change), ("principal", main), ("low", small), ("both", main * small)):
            lines[0][name][low:high] = values.sum(axis=1, dtype=np.float64)
            lines[1][name] += values.sum(axis=0, dtype=np.float64)
    share = weights[np.arange(NUM_CODES) & int(MAGNITUDE)].astype(np.float64)
    change = table[1] + table[3]
    return MaskCounts(
        every,
        change,
        _four(every, table[2] + table[3], share),
        _four(change, table[3], share),
        (_lines(lines[0], codes.shape[1]), _lines(lines[1], codes.shape[0])),
        (codes.shape[0], codes.shape[1]),
        ties,
    )


def _four(every: np.ndarray, principal: np.ndarray, low_share: np.ndarray) -> dict[str, np.ndarray]:
    """Counts by code within the four masks; "low or not principal" is what "principal, not low" leaves."""
    only = principal * (1 - low_share)
    return dict(zip(MASKS, (principal.astype(np.float64), every * low_share, only, every - only), strict=True))


def _lines(counts: dict[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    only = counts["principal"] - counts["both"]
    named = dict(zip(MASKS, (counts["principal"], counts["low"], only, size - only), strict=True))
    return {"moved": counts["moved"], **named}


def projections(delta: torch.Tensor, u: np.ndarray, v: np.ndarray, total: float) -> dict[str, float]:
    """Shares of ‖D‖² in the spans of u [m, k] and v [n, k]: ‖U^T D V‖², ‖U^T D‖², ‖D V‖² over `total`."""
    d = delta.numpy()
    left, right = (np.asarray(x, dtype=np.float32) for x in (u, v))
    inside = left.T @ d
    shares = {"both": inside @ right, "left": inside, "right": d @ right}
    return {name: float(np.square(part, dtype=np.float64).sum()) / total for name, part in shares.items()}


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """|a and b| / |a or b| of boolean masks; independent ones of densities p, q give pq / (p + q - pq)."""
    union = np.count_nonzero(a | b)
    return float(np.count_nonzero(a & b) / union) if union else float("nan")


def independent_jaccard(p: float, q: float) -> float:
    return p * q / (p + q - p * q) if p + q > 0 else float("nan")
