"""The report of a study."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from statewise.report import write
from statewise.study.results import StudyResults

if TYPE_CHECKING:
    from statewise.report.model import ReportModel


def study_model(study: StudyResults, versus: str | None = None) -> ReportModel:
    """The report's plain data: every planned run, failed and missing ones too."""
    from statewise.report.model import Question, build
    from statewise.report.reading import Planned, RunView, read_run

    runs: list[RunView | Planned] = [
        Planned(run.arm, run.seed) if run.status == "waiting" else read_run(run.path, run.arm, run.base)
        for run in study.runs
    ]
    budgets = {run.arm: _words(run.plan.get("budget", {})) for run in study.runs}
    shared = max(dict.fromkeys(budgets.values()), key=list(budgets.values()).count)
    others = [f"{arm}: {told}" for arm, told in budgets.items() if told != shared]
    question = Question(
        title=str(study.plan["name"]),
        about=str(study.plan.get("about", "")),
        target=study.plan["target"],
        purposes=study.purposes,
        versus=versus or study.plan.get("versus"),
        budget="" if others else f"Budget of every arm: {shared}.",
        warnings=(f"Budgets differ: {'; '.join([*others, f'all others: {shared}'])}.",) if others else (),
    )
    return build(runs, question)


def _words(budget: dict[str, float]) -> str:
    return ", ".join(f"{name} = {value:g}" for name, value in budget.items())


def study_report(study: StudyResults, out: str | Path | None = None, versus: str | None = None) -> Path:
    """Write the study's page, by default into its directory."""
    return write(study_model(study, versus), out or study.path / "report.html")
