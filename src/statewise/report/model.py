"""A report as plain data: everything that a page shows, before anything is drawn. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from statewise.files import plain
from statewise.report.reading import Planned, RunView

Row = dict[str, Any]


@dataclass(frozen=True)
class ReportModel:
    """Plain values throughout; an estimate is {"value", "low", "high"}.

    arms: one a row of the score table, the untrained model first; contrasts: what was tested, with verdicts.
    evaluated: which evaluations the scores are of, where there is a choice.
    curves: {metric: [{"arm", "seed", "x", "y"}]}; differences: recipe settings by arm, where arms differ.
    completions: before and after; cards: facts of each arm; drift: measures a run, and how they rank retention;
    tables: of other diagnostics, by name.
    """

    title: str
    about: str
    target: str | None
    versus: str | None
    answer: list[str]
    warnings: list[str]
    tasks: list[Row]
    arms: list[Row]
    contrasts: list[Row]
    method: str
    evaluated: str
    curves: dict[str, list[Row]]
    budget: str
    budgets: list[Row]
    differences: list[Row]
    completions: list[Row]
    cards: list[Row]
    drift: list[Row] = field(default_factory=list)
    drift_ranks: list[Row] = field(default_factory=list)
    tables: dict[str, list[Row]] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        found: dict[str, Any] = plain(asdict(self))
        return found


@dataclass(frozen=True)
class Question:
    """What the report is about: the target task, the tasks' purposes, the arm that others are compared with.

    budget: what all arms had, in words; warnings: besides those of the runs.
    """

    title: str
    about: str = ""
    target: str | None = None
    purposes: Mapping[str, str] = field(default_factory=dict)
    versus: str | None = None
    budget: str = ""
    warnings: tuple[str, ...] = ()


def build(runs: Sequence[RunView | Planned], question: Question) -> ReportModel:
    """The model of a report on these runs. Raises DataError where runs that are compared saw different examples."""
    from statewise.report import answer, drift, facts, scores

    views = [run for run in runs if isinstance(run, RunView)]
    names = facts.names_of(views)
    arms = list(dict.fromkeys(run.arm for run in runs))
    table = scores.tabulate(views, arms, question)
    retention = [row["task"] for row in table.tasks if row["purpose"] == "retention"]
    drifted = drift.measured(views, drift.kept_by_seed(table.arms, retention))
    return ReportModel(
        title=question.title,
        about=question.about,
        target=table.target,
        versus=table.versus,
        answer=answer.sentences(table),
        warnings=[*facts.warnings(runs), *question.warnings],
        tasks=table.tasks,
        arms=table.arms,
        contrasts=table.contrasts,
        method=table.method,
        evaluated=facts.evaluated(views, arms),
        curves=facts.curves(views),
        budget=question.budget,
        budgets=facts.budgets(views, arms),
        differences=facts.differences(views, arms, names),
        completions=facts.completions(views, arms, table.target),
        cards=facts.cards(views, arms, names),
        drift=drifted,
        drift_ranks=drift.ranked(drifted),
        tables=facts.diagnostic_tables(views),
    )
