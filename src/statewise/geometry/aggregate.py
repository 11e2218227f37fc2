"""Means over matrices: plain, as the papers give them, and weighted by parameters; for all, by module type and by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from statewise.stats.hypothesis import mean_interval

IDENTITY = ("matrix", "module", "layer", "checkpoint", "rows", "columns", "entries")
Row = dict[str, Any]


def metrics_of(rows: Sequence[Row]) -> list[str]:
    """The columns that hold one number a matrix."""
    named = dict.fromkeys(name for row in rows for name in row if name not in IDENTITY)
    return [name for name in named if _is_number(next((r[name] for r in rows if r.get(name) is not None), None))]


def groups_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """ "all", "module q" ..., "layer 0" ...: the rows of each."""
    found: dict[str, list[Row]] = {"all": list(rows)}
    for name in ("module", "layer"):
        for value in dict.fromkeys(row[name] for row in rows if row[name] is not None):
            found[f"{name} {value}"] = [row for row in rows if row[name] == value]
    return found


def summarise(values: Sequence[float], weights: Sequence[float]) -> dict[str, float]:
    """n, mean, its 95 % interval over matrices, the parameter-weighted mean, and the median, of the values that are finite."""
    x, w = np.asarray(values, dtype=float), np.asarray(weights, dtype=float)
    x, w = x[np.isfinite(x)], w[np.isfinite(x)]
    if not x.size:
        return {"n": 0, **dict.fromkeys(("mean", "low", "high", "weighted", "median"), math.nan)}
    low, high = mean_interval(x)
    weighted = float(x @ w / w.sum())
    return {
        "n": x.size,
        "mean": float(x.mean()),
        "low": low,
        "high": high,
        "weighted": weighted,
        "median": float(np.median(x)),
    }


def aggregate(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """{checkpoint: {group: {metric: {n, mean, low, high, weighted, median}}}}."""
    metrics = metrics_of(rows)
    found = {}
    for checkpoint in dict.fromkeys(row["checkpoint"] for row in rows):
        own = [row for row in rows if row["checkpoint"] == checkpoint]
        found[checkpoint] = {
            group: {metric: _metric(members, metric) for metric in metrics} for group, members in groups_of(own).items()
        }
    return found


def _metric(rows: Sequence[Row], metric: str) -> dict[str, float]:
    have = [row for row in rows if row.get(metric) is not None]
    return summarise([float(row[metric]) for row in have], [row["entries"] for row in have])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
