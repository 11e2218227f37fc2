"""Reports: plain data from run directories, and one HTML file from plain data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from statewise.report.model import ReportModel


def write(model: ReportModel, path: str | Path) -> Path:
    """The model's page, in `path`, or in report.html of the directory `path`; the same model gives the same bytes."""
    from statewise.report.page import write_page
    from statewise.report.sections import lead, sections

    path = Path(path)
    return write_page(path / "report.html" if path.is_dir() else path, model.title, lead(model), sections(model))


def report(runs: Sequence[str | Path], out: str | Path, *, title: str | None = None, versus: str | None = None) -> Path:
    """Write the report of run directories; those that differ in their seed alone are one arm. Returns its path."""
    from statewise.report.model import Question, build
    from statewise.report.reading import grouped

    views = grouped(runs)
    named = title or (views[0].name if len(views) == 1 else f"{len(views)} runs")
    return write(build(views, Question(named, versus=versus)), out)
