"""Drift against retention: the measures of `statewise drift` beside what runs forgot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from statewise.stats.rank import spearman, spearman_interval

if TYPE_CHECKING:
    from statewise.report.reading import RunView

Row = dict[str, Any]
FEWEST = 4  # runs below which a rank correlation says nothing


def measured(views: Sequence[RunView], by_seed: Mapping[tuple[str, int], float]) -> list[Row]:
    """{"arm", "seed", "kept", "measures"} of every run with diagnostics/drift.json; kept: its mean of post / base."""
    found = []
    for view in views:
        told = view.diagnostics.get("drift", [{}])[0].get("measures")
        kept = by_seed.get((view.arm, view.seed))
        if isinstance(told, Mapping) and kept is not None:
            found.append({"arm": view.arm, "seed": view.seed, "kept": kept, "measures": dict(told)})
    return found


def kept_by_seed(arms: Sequence[Row], retention: Sequence[str]) -> dict[tuple[str, int], float]:
    """{(arm, seed): mean over retention tasks of post / base}."""
    found = {}
    for row in arms:
        for seed in row["by_seed"]:
            ratios = [seed["kept"][task] for task in retention if task in seed["kept"]]
            if ratios:
                found[row["arm"], seed["seed"]] = fmean(ratios)
    return found


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Spearman's correlation of each measure with retention over runs, strongest first; whole arms are redrawn."""
    names = dict.fromkeys(name for row in rows for name in row["measures"])
    found = []
    for name in names:
        known = [row for row in rows if isinstance(row["measures"].get(name), int | float)]
        x, y = [row["measures"][name] for row in known], [row["kept"] for row in known]
        rho = spearman(x, y) if len(known) >= FEWEST else math.nan
        low, high = (math.nan, math.nan)
        if not math.isnan(rho):
            low, high = spearman_interval(x, y, clusters=[row["arm"] for row in known], resamples=2000)
        means = _means(known, name)
        found.append(
            {"measure": name, "runs": len(known), "rho": {"value": rho, "low": low, "high": high}, "means": means}
        )
    return sorted(found, key=lambda row: (math.isnan(row["rho"]["value"]), -abs(row["rho"]["value"]), row["measure"]))


def _means(rows: Sequence[Row], name: str) -> dict[str, float]:
    arms = dict.fromkeys(row["arm"] for row in rows)
    return {arm: fmean(row["measures"][name] for row in rows if row["arm"] == arm) for arm in arms}
