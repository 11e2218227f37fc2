"""Which measure of drift ranks runs by what they forgot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from statewise.drift.runs import read
from statewise.errors import DataError
from statewise.evals.from_runs import run_ledger
from statewise.stats.rank import spearman, spearman_interval


@dataclass(frozen=True)
class Ranked:
    """Spearman's correlation of a measure with mean forgetting over runs, and over means of arms.

    low, high: 95 % percentile bootstrap in which whole arms are redrawn, since seeds of an arm are alike.
    rho_without_worst: over runs, without the arm that forgot most: near 0 where that arm alone made the correlation.
    """

    measure: str
    runs: int
    arms: int
    rho: float
    low: float
    high: float
    rho_of_arms: float
    rho_without_worst: float

    @property
    def verdict(self) -> str:
        """In words, of the interval."""
        if math.isnan(self.low):
            return "undefined"
        return "ranks forgetting" if self.low > 0 or self.high < 0 else "not shown to rank"


@dataclass(frozen=True)
class Point:
    """A run: its arm, what it forgot, and its measures."""

    run: str
    arm: str
    forgetting: float
    measures: Mapping[str, float]


@dataclass(frozen=True)
class Studied:
    """A run of a method. base: an evaluation in place of its own step 0; model: the base model, where not its own start.

    purposes: {task: purpose} where it is not the task's own.
    """

    arm: str
    run: Path
    base: Path | None = None
    model: Any = None
    purposes: Mapping[str, str] | None = None


def points(runs: Sequence[Studied]) -> list[Point]:
    """Of runs that were measured and evaluated. Raises DataError where one was not measured."""
    found = []
    for run in runs:
        drift = read(run.run)
        if drift is None:
            raise DataError(f"{run.run}: has no drift measured; run `statewise drift {run.run}` first.")
        ledger = run_ledger(run.run, base=run.base, purposes=run.purposes)
        probes = {f"rise_of_{c.task}": c.forgetting.value for c in ledger.of("probe")}
        found.append(Point(str(run.run), run.arm, ledger.forgetting.value, {**drift["measures"], **probes}))
    return found


def rank(found: Sequence[Point], resamples: int = 2000) -> list[Ranked]:
    """Every measure that all runs have, the strongest correlation first."""
    shared = [m for m in (found[0].measures if found else ()) if all(p.measures.get(m) is not None for p in found)]
    ranked = [_ranked(measure, found, resamples) for measure in shared]
    return sorted(ranked, key=lambda r: (math.isnan(r.rho), -abs(r.rho), r.measure))


def _ranked(measure: str, found: Sequence[Point], resamples: int) -> Ranked:
    x, y = [p.measures[measure] for p in found], [p.forgetting for p in found]
    arms = [p.arm for p in found]
    names = list(dict.fromkeys(arms))
    low, high = spearman_interval(x, y, clusters=arms, resamples=resamples)
    means = [
        [_mean([v for v, arm in zip(side, arms, strict=True) if arm == name]) for name in names] for side in (x, y)
    ]
    worst = names[max(range(len(names)), key=means[1].__getitem__)]
    rest = [place for place, arm in enumerate(arms) if arm != worst]
    without = spearman([x[place] for place in rest], [y[place] for place in rest])
    return Ranked(measure, len(found), len(names), spearman(x, y), low, high, spearman(*means), without)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def to_plain(found: Sequence[Point], ranked: Sequence[Ranked]) -> dict[str, Any]:
    """Nested dicts, as JSON holds them."""
    return {
        "runs": [{**vars(p), "measures": dict(p.measures)} for p in found],
        "measures": [{**vars(r), "verdict": r.verdict} for r in ranked],
    }
