"""Scores of arms against the untrained model and against one arm, with paired intervals and adjusted p-values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from statewise.evals.ledger import ALPHA, Change, Estimate, Ledger, make_ledger
from statewise.stats.hypothesis import holm

if TYPE_CHECKING:
    from statewise.report.model import Question
    from statewise.report.reading import RunView

Row = dict[str, Any]
BASE = "base"


@dataclass(frozen=True)
class Scores:
    """The arms as rows, what was tested, and how."""

    target: str | None
    versus: str | None
    tasks: list[Row]
    arms: list[Row]
    contrasts: list[Row]
    method: str

    def of(self, against: str, purpose: str) -> list[Row]:
        """Contrasts with one arm (or "base") on the tasks of one purpose."""
        return [row for row in self.contrasts if row["against"] == against and row["purpose"] == purpose]


def tabulate(views: Sequence[RunView], arms: Sequence[str], question: Question) -> Scores:
    """Scores, changes and contrasts of all arms."""
    purposes = purposes_of(views, question)
    target = question.target or next((task for task, purpose in purposes.items() if purpose == "target"), None)
    by_arm = {arm: [view for view in views if view.arm == arm and view.scores] for arm in arms}
    versus = question.versus if by_arm.get(question.versus or "") else None
    ledgers = {arm: _against_base(arm, runs, purposes) for arm, runs in by_arm.items()}
    others = {arm: _against(arm, by_arm, versus, purposes) for arm in arms if versus and arm != versus}
    contrasts = _adjusted(_contrasts(ledgers, BASE)) + _adjusted(_contrasts(others, versus or ""))
    rows = _base_rows(views) + [_arm_row(arm, by_arm[arm], ledgers[arm]) for arm in arms if by_arm[arm]]
    tasks = [_task_row(task, purpose, views) for task, purpose in purposes.items()]
    return Scores(target, versus, tasks, rows, contrasts, _method(contrasts, ledgers))


def purposes_of(views: Sequence[RunView], question: Question) -> dict[str, str]:
    """{task: purpose}: as the question says, else the task's own; the target first."""
    own: dict[str, str] = {}
    for name, result in (item for view in views if view.scores for item in view.scores.items()):
        own.setdefault(name, question.purposes.get(name, result.purpose))
    if question.target is not None and question.target in own:
        own[question.target] = "target"
    order = ("target", "retention", "probe")
    return dict(sorted(own.items(), key=lambda item: order.index(item[1]) if item[1] in order else len(order)))


def _against_base(arm: str, runs: Sequence[RunView], purposes: dict[str, str]) -> Ledger | None:
    pairs = [(run.base, run.scores) for run in runs if run.base]
    return make_ledger(arm, pairs, purposes) if pairs else None  # type: ignore[arg-type]


def _against(arm: str, by_arm: dict[str, list[RunView]], versus: str | None, purposes: dict[str, str]) -> Ledger | None:
    """The arm with the other in the base's place: over shared seeds, else the first runs of both."""
    others = {run.seed: run for run in by_arm.get(versus or "", [])}
    pairs = [(others[run.seed].scores, run.scores) for run in by_arm[arm] if run.seed in others]
    if not pairs and by_arm[arm] and others:
        pairs = [(next(iter(others.values())).scores, by_arm[arm][0].scores)]
    return make_ledger(arm, pairs, purposes) if pairs else None  # type: ignore[arg-type]


def gain(change: Change) -> Estimate:
    """What a task gained: minus its forgetting; for nats a token a fall is a gain."""
    lost = change.forgetting
    return Estimate(0.0 - lost.value, 0.0 - lost.high, 0.0 - lost.low)


def _contrasts(ledgers: dict[str, Ledger | None], against: str) -> list[Row]:
    """Every tested difference: positive is better for the arm."""
    return [
        {
            "arm": arm,
            "against": against,
            "task": change.task,
            "purpose": change.purpose,
            "n": change.n,
            "seeds": change.seeds,
            "before": change.base,
            "after": change.post,
            "difference": vars(gain(change)),
            "gained": change.gained,
            "lost": change.lost,
            "p": change.p_value,
            "test": change.test,
        }
        for arm, ledger in ledgers.items()
        for change in (ledger.changes if ledger else ())
    ]


def _adjusted(rows: list[Row]) -> list[Row]:
    """With Holm's p-values over all contrasts of target and retention tasks with the same opponent, and a verdict."""
    tested = [row["purpose"] != "probe" and not math.isnan(row["p"]) for row in rows]
    adjusted = iter(holm([row["p"] for row, is_tested in zip(rows, tested, strict=True) if is_tested]))
    rows = [
        {**row, "p_holm": next(adjusted) if is_tested else None} for row, is_tested in zip(rows, tested, strict=True)
    ]
    return [{**row, "verdict": _verdict(row)} for row in rows]


def _verdict(row: Row) -> str:
    p = row["p"] if row["p_holm"] is None else row["p_holm"]
    if not p < ALPHA:
        return "not significant"
    return "better" if row["difference"]["value"] > 0 else "worse"


def _base_rows(views: Sequence[RunView]) -> list[Row]:
    """The untrained model on each task, as the first run that measured it there has it."""
    scores: dict[str, Row] = {}
    for name, r in (item for view in views if view.base for item in view.base.items()):
        scores.setdefault(name, {"value": r.mean, "low": r.low, "high": r.high})
    return [{"arm": BASE, "seeds": [], "scores": scores, "by_seed": []}] if scores else []


def _arm_row(arm: str, runs: Sequence[RunView], ledger: Ledger | None) -> Row:
    names = [name for name in runs[0].scores or () if all(name in (run.scores or {}) for run in runs)]
    means = {name: [run.scores[name] for run in runs if run.scores] for name in names}
    row: Row = {
        "arm": arm,
        "seeds": [run.seed for run in runs],
        "scores": {name: _mean(results) for name, results in means.items()},
        "by_seed": [_of_seed(run) for run in runs],
    }
    if ledger is not None:
        row["forgetting"] = {c.task: vars(c.forgetting) for c in ledger.changes}
        row["mean_forgetting"], row["retention"] = vars(ledger.forgetting), vars(ledger.retention)
    return row


def _mean(results: Sequence[Any]) -> Row:
    """The mean over seeds; an interval where there is one seed."""
    if len(results) == 1:
        return {"value": results[0].mean, "low": results[0].low, "high": results[0].high}
    return {"value": sum(r.mean for r in results) / len(results), "low": math.nan, "high": math.nan}


def _of_seed(run: RunView) -> Row:
    """Scores of one seed, and each task's post / base."""
    scores = {name: result.mean for name, result in (run.scores or {}).items()}
    kept = {
        name: result.mean / run.base[name].mean
        for name, result in (run.scores or {}).items()
        if result.higher_is_better and run.base and name in run.base and run.base[name].mean > 0
    }
    return {"seed": run.seed, "scores": scores, "kept": kept}


def _task_row(task: str, purpose: str, views: Sequence[RunView]) -> Row:
    result = next(view.scores[task] for view in views if view.scores and task in view.scores)
    better = "higher" if result.higher_is_better else "lower"
    return {"task": task, "purpose": purpose, "metric": result.metric, "n": result.n, "better": better}


def _method(contrasts: Sequence[Row], ledgers: dict[str, Ledger | None]) -> str:
    first = next((ledger for ledger in ledgers.values() if ledger), None)
    if first is None:
        return ""
    said = replace(first, changes=tuple(c for ledger in ledgers.values() if ledger for c in ledger.changes)).method
    families = {
        against: sum(1 for c in contrasts if c["against"] == against and c["p_holm"] is not None)
        for against in dict.fromkeys(c["against"] for c in contrasts)
    }
    family = ", ".join(f"{count} comparisons with {against}" for against, count in families.items())
    return (
        f"{said.rpartition(' adjusted by Holm')[0]} adjusted by Holm over the {family}; significant: below {ALPHA:g}."
    )
