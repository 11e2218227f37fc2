"""The study table: a row an arm, with forgetting and retention as arXiv 2605.22731 defines them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from statewise.study.results import Paired, StudyResults, StudyRun, difference, progress

Row = dict[str, Any]


def table(study: StudyResults, versus: str | None = None) -> list[Row]:
    """Base first, then a row an arm: scores, gain, forgetting and retention as {"value", "low", "high"}, and costs.

    gain: of the target over the untrained model; forgetting: base - post a task; retention: the mean over tasks of
    post / base; versus: target minus that of the arm named.
    """
    versus = versus or study.plan.get("versus")
    rows = [_base_row(study)] if any(run.base for run in study.runs) else []
    return rows + [_arm_row(study, arm, versus) for arm in study.arms]


def _base_row(study: StudyResults) -> Row:
    base = next(run.base for run in study.runs if run.base is not None)
    return {"arm": "base", "seeds": 0, "scores": {name: task["mean"] for name, task in base.tasks.items()}}


def _arm_row(study: StudyResults, arm: str, versus: str | None) -> Row:
    runs = [run for run in study.of(arm) if run.base is not None]
    planned = [run for run in study.runs if run.arm == arm]
    row: Row = {"arm": arm, "seeds": len(runs), "planned": len(planned), "own_budget": planned[0].plan["own_budget"]}
    if not runs:
        return row | {"status": ", ".join(sorted({run.status for run in planned}))}
    pairs = [(run.scores, run.base) for run in runs if run.scores is not None and run.base is not None]
    target, retention = study.plan["target"], study.retention
    row["scores"] = {task: fmean(post.tasks[task]["mean"] for post, _ in pairs) for task in study.tasks}
    row["gain"] = vars(difference(pairs, target))
    row["forgetting"] = {task: vars(_negated(difference(pairs, task))) for task in retention}
    row["mean_forgetting"] = fmean(value["value"] for value in row["forgetting"].values()) if retention else None
    row["retention"] = _retention(pairs, retention)
    others = {run.seed: run for run in study.of(versus)} if versus and versus != arm else {}
    shared = [(run.scores, others[run.seed].scores) for run in runs if run.seed in others]
    if shared:
        row["versus"] = {"arm": versus, **vars(difference(shared, target))}  # type: ignore[arg-type]
    return row | _costs(runs)


def _negated(gap: Paired) -> Paired:
    return Paired(0.0 - gap.value, 0.0 - gap.high, 0.0 - gap.low)


def _retention(pairs: Sequence[Any], tasks: Sequence[str]) -> float | None:
    ratios = [fmean(post.tasks[t]["mean"] / base.tasks[t]["mean"] for post, base in pairs) for t in tasks]
    return fmean(ratios) if ratios else None


def _costs(runs: Sequence[StudyRun]) -> Row:
    """Means over seeds: seconds in steps, and tokens."""
    spent = [run.info.get("spent") or {} for run in runs]
    seconds = [progress(run).get("seconds", 0.0) for run in runs]
    names = [name for name in spent[0] if name.endswith("tokens")] if spent else []
    return {"seconds": fmean(seconds), **{name: fmean(s.get(name, 0) for s in spent) for name in names}}


def status(study: StudyResults) -> list[Row]:
    """A row a run."""
    return [
        {
            "arm": run.arm,
            "seed": run.seed,
            "status": run.status,
            **progress(run),
            "error": run.error,
            "run": str(run.path),
        }
        for run in study.runs
    ]
