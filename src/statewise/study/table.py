"""The study table: a row an arm, with forgetting and retention as arXiv 2605.22731 defines them."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from statewise.evals.ledger import Change, Estimate
from statewise.files import plain
from statewise.study.results import StudyResults, progress, why_waiting

Row = dict[str, Any]
TOKENS = {"trained_tokens": "tokens", "generated_tokens": "generated_tokens", "teacher_tokens": "teacher_tokens"}


def table(study: StudyResults, versus: str | None = None) -> list[Row]:
    """The untrained model first, then a row an arm, as plain values; an estimate is {"value", "low", "high"}.

    gain: of the target over the untrained model (p_holm: adjusted over the arm's tasks); forgetting: base - post a task;
    retention: the mean over tasks of post / base; versus: the target's difference to the arm named; means over seeds.
    """
    versus = versus or study.plan.get("versus")
    return [*_base_row(study), *(plain(_arm_row(study, arm, versus)) for arm in study.arms)]


def _base_row(study: StudyResults) -> list[Row]:
    scores = next((run.base_scores for run in study.runs if run.base_scores), None)
    if scores is None:
        return []
    return [{"arm": "base", "seeds": 0, "scores": {name: result.mean for name, result in scores.items()}}]


def _arm_row(study: StudyResults, arm: str, versus: str | None) -> Row:
    planned = [run for run in study.runs if run.arm == arm]
    row: Row = {"arm": arm, "planned": len(planned), "own_budget": planned[0].plan["own_budget"]}
    ledger = study.ledger(arm)
    if ledger is None:
        return row | {"seeds": 0, "status": ", ".join(sorted({run.status for run in planned}))}
    changes = {change.task: change for change in ledger.changes}
    row |= {
        "seeds": ledger.seeds,
        "scores": {task: change.post for task, change in changes.items()},
        "gain": gain(changes[study.plan["target"]]),
        "forgetting": {c.task: {**vars(c.forgetting), **_p(c)} for c in ledger.of("retention")},
        "mean_forgetting": vars(ledger.forgetting),
        "retention": vars(ledger.retention),
    }
    other = study.against(arm, versus) if versus and versus != arm else None
    if other is not None:
        row["versus"] = {"arm": versus, **gain(next(c for c in other.changes if c.purpose == "target"))}
    return row | _costs(study, arm)


def gain(change: Change) -> dict[str, float]:
    """What the task gained: minus its forgetting."""
    lost = change.forgetting
    return {**vars(Estimate(0.0 - lost.value, 0.0 - lost.high, 0.0 - lost.low)), **_p(change)}


def _p(change: Change) -> dict[str, float]:
    return {"p": change.p_value, "p_holm": change.p_holm}


def _costs(study: StudyResults, arm: str) -> Row:
    """Means over seeds: seconds in steps, tokens by kind, operations."""
    runs = study.of(arm)
    spent: list[Mapping[str, float]] = [run.info.get("spent") or {} for run in runs]
    seconds = fmean(progress(run)["seconds"] for run in runs)
    counts = {name: fmean(s.get(key, 0) for s in spent) for name, key in TOKENS.items()}
    return {"seconds": seconds, **counts, "flops": fmean(s.get("flops", 0.0) for s in spent)}


def status(study: StudyResults) -> list[Row]:
    """A row a run; error: why it failed, or what keeps it from beginning."""
    return [
        {
            "arm": run.arm,
            "seed": run.seed,
            "status": run.status,
            **progress(run),
            "error": why_waiting(study, run) if run.status == "waiting" else run.error,
            "run": str(run.path),
        }
        for run in study.runs
    ]
