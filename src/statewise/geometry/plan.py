"""What a comparison will cost before it starts: seconds by tier, and the peak memory of a worker."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import cache

import numpy as np

from statewise.geometry.cache import bytes_needed
from statewise.geometry.matrices import Matrix
from statewise.geometry.origin import Settings

PROBE = 768  # side of the product that measures this machine
# Seconds an entry, on one thread; the rest is arithmetic and scales with the machine's products.
PER_ENTRY = {"support": 15e-9, "update": 15e-9, "masks": 70e-9}
# Shares of the speed of a product at which LAPACK's steps run: half of a tridiagonal reduction is bound by memory.
TRIDIAGONAL, BACK, SINGLE = 0.35, 0.7, 2.0
KRYLOV = 4 * 24 * 7  # products of a block of 24, seven blocks, there and back
BASE_BYTES = 350e6  # Python, NumPy, SciPy and torch


@cache
def flops_per_second() -> float:
    """Of a float64 product here and now, the best of three."""
    a = np.random.default_rng(0).standard_normal((PROBE, PROBE))
    times = []
    for _ in range(3):
        started = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - started)
    return float(2 * PROBE**3 / min(times))


def seconds_by_tier(matrices: Sequence[Matrix], settings: Settings, updates: int, workers: int = 1) -> dict[str, float]:
    """Expected seconds of each chosen tier, all matrices and `updates` checkpoints together."""
    total = dict.fromkeys(settings.tiers, 0.0)
    for matrix in matrices:
        for tier, seconds in _seconds(matrix.shape, settings, updates).items():
            total[tier] += seconds / workers
    return total


def _seconds(shape: tuple[int, int], settings: Settings, updates: int) -> dict[str, float]:
    entries, p, longest = shape[0] * shape[1], min(shape), max(shape)
    rate = flops_per_second()
    values = (p * p * longest + 4 / 3 * p**3 / TRIDIAGONAL) / rate
    k = min(settings.angle_k, p // 2)
    vectors = (4 * p * p * k / BACK + 2 * entries * k + 8 * (p + longest) * k * k) / rate
    cost = {tier: seconds * entries * updates for tier, seconds in PER_ENTRY.items()}
    cost["update"] += updates * KRYLOV * entries / rate / SINGLE
    cost["spectrum"] = values * (1 + updates + updates / SINGLE)
    cost["angles"] = vectors * (1 + updates)
    if not settings.has("spectrum"):
        cost["angles"] += values * (1 + updates)
    return {tier: cost[tier] if p > 1 or tier in ("support", "update") else 0.0 for tier in settings.tiers}


def peak_bytes(matrices: Sequence[Matrix], settings: Settings) -> float:
    """Of one worker, at its largest matrix."""
    return max(BASE_BYTES + _bytes(m.shape, settings) for m in matrices)


def _bytes(shape: tuple[int, int], settings: Settings) -> float:
    entries, p = shape[0] * shape[1], min(shape)
    k = min(settings.angle_k, p // 2)
    held = 4 * entries  # two tensors in bf16
    held += 5 * entries if settings.has("update", "spectrum", "angles", "masks") else entries
    if settings.has("spectrum", "angles"):
        held += 8 * (3 * p * p + 4 * sum(shape) * k)
    return float(held)


def cache_bytes(matrices: Sequence[Matrix], settings: Settings) -> int:
    """What the cache of start weights will take on disk."""
    wide = [m.shape for m in matrices if min(m.shape) > 1]
    return sum(bytes_needed(s, max(min(settings.angle_k, min(s) // 2), min(settings.rank, min(s) // 4))) for s in wide)


def duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min`, `2.5 h`."""
    if seconds < 10:
        return f"{max(seconds, 0.1):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def default_workers(matrices: Sequence[Matrix], settings: Settings, cores: int, free_bytes: float) -> int:
    """A worker a core, as far as memory goes; one where the work is small."""
    fits = max(1, math.floor(0.8 * free_bytes / peak_bytes(matrices, settings)))
    return min(cores, fits, len(matrices))
