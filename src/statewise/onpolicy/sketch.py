"""Counts, sums and quantiles of numbers that pass by, in memory that does not grow with them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Sketch:
    """Numbers in bins of `width` from `low` on; what lies outside counts in the outermost bins."""

    low: float
    high: float
    width: float
    counts: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.counts = np.zeros(round((self.high - self.low) / self.width), dtype=np.int64)

    def add(self, values: np.ndarray) -> None:
        at = np.floor((np.asarray(values, np.float64) - self.low) / self.width)
        at = at[~np.isnan(at)].clip(0, len(self.counts) - 1).astype(np.int64)
        self.counts += np.bincount(at, minlength=len(self.counts))

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def quantile(self, share: float) -> float:
        """Middle of the bin that holds it: off by at most half a width."""
        if not self.total:
            return math.nan
        place = int(np.searchsorted(self.counts.cumsum(), max(1, math.ceil(share * self.total))))
        return self.low + (place + 0.5) * self.width

    def bars(self, most: int = 80) -> tuple[list[float], list[int], float]:
        """(middle, count) of at most `most` wider bins around what was seen, and their width."""
        seen = np.flatnonzero(self.counts)
        if not seen.size:
            return [], [], self.width
        start, stop = int(seen[0]), int(seen[-1]) + 1
        group = math.ceil((stop - start) / most)
        padded = np.pad(self.counts[start:stop], (0, -(stop - start) % group)).reshape(-1, group).sum(1)
        width = group * self.width
        middles = [self.low + start * self.width + (i + 0.5) * width for i in range(len(padded))]
        return middles, padded.tolist(), width


@dataclass
class Profile:
    """Mean and standard error by position of the token in its answer, in bins that grow with it: 0, 1, 2 ... 14-16 ..."""

    edges: np.ndarray = field(default_factory=lambda: np.unique(np.geomspace(1, 1e6, 90).astype(np.int64)) - 1)

    def __post_init__(self) -> None:
        self.count, self.total, self.square = (np.zeros(len(self.edges)) for _ in range(3))

    def add(self, values: np.ndarray) -> None:
        """Of one answer, from its first token on."""
        at = np.searchsorted(self.edges, np.arange(len(values)), "right") - 1
        x = values.astype(np.float64)
        for held, weights in ((self.count, np.ones_like(x)), (self.total, x), (self.square, x * x)):
            held += np.bincount(at, weights=weights, minlength=len(self.edges))

    def rows(self, least: int = 2) -> list[dict[str, float]]:
        """{position (first of the bin), tokens, mean, se} of the bins that hold at least `least` tokens."""
        found = []
        for start, n, total, square in zip(self.edges, self.count, self.total, self.square, strict=True):
            if n >= least:
                mean = total / n
                variance = max(0.0, square / n - mean * mean) * n / (n - 1)
                found.append({"position": int(start), "tokens": int(n), "mean": mean, "se": math.sqrt(variance / n)})
        return found
