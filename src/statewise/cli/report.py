"""`statewise report` and `statewise compare`: what runs show, as a page and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from statewise.cli.output import print_json, print_table, say
from statewise.errors import RunError
from statewise.estimates import few_seeds

if TYPE_CHECKING:
    from statewise.report.model import ReportModel

RUNS = typer.Argument(help="Run directories, directories of `eval --out`, or one study's file or directory.")
BASE = typer.Option(None, help="A run (its step 0) or a directory of `eval --out`, as the base of all.")
VS = typer.Option(None, "--vs", help="The arm (or run directory) that the others are compared with.")
JSON = typer.Option(False, "--json", help="Print the report's data as JSON; writes no page.")


def report(
    runs: list[Path] = RUNS,
    out: Path = typer.Option(
        None, help="HTML file, or a directory for report.html; default: in the run, the study, or here."
    ),
    vs: str = VS,
    base: Path = BASE,
    as_json: bool = JSON,
) -> None:
    """Write what runs or a study show as one HTML file that opens offline.

    Runs that differ in their seed alone are taken together.
    """
    from statewise.report import write

    model = _model(runs, vs, base)
    if as_json:
        return print_json(model.to_plain())
    print(write(model, out or _place(runs)))


def compare(
    runs: list[Path] = RUNS,
    vs: str = VS,
    base: Path = BASE,
    html: Path = typer.Option(None, help="Write the page too."),
    as_json: bool = JSON,
) -> None:
    """Differences between runs on the same examples, and between their recipes; against the first, or --vs.

    Prints paired intervals and Holm-adjusted p-values.
    """
    model = _model(runs, vs, base, first=True)
    if len(model.cards) < 2:
        raise RunError("compare: received one arm, expected several; runs that differ in their seed alone are one arm.")
    if html is not None:
        from statewise.report import write

        write(model, html)
    if as_json:
        return print_json(model.to_plain())
    _print(model)


def _model(runs: Sequence[Path], vs: str | None, base: Path | None, first: bool = False) -> ReportModel:
    study = _study(runs[0])
    if study is not None and len(runs) == 1:
        from statewise.study.reporting import study_model
        from statewise.study.results import read_study

        found = read_study(study)
        return study_model(found, vs or (found.plan.get("versus") or found.arms[0] if first else None))
    from statewise.report.model import Question, build
    from statewise.report.reading import grouped

    views = grouped(runs, base)
    named = {str(view.path): view.arm for view in views} | {view.arm: view.arm for view in views}
    if vs is not None and vs.rstrip("/") not in named:
        raise RunError(f"--vs: no run or arm '{vs}'; there are: {', '.join(named)}.")
    chosen = named[vs.rstrip("/")] if vs is not None else views[0].arm if first else None
    title = views[0].name if len(views) == 1 else f"{len(views)} runs"
    return build(views, Question(title, versus=chosen))


def _study(path: Path) -> Path | None:
    """The path, where it is a study's."""
    directory = path.with_suffix("") if path.suffix == ".toml" else path
    return path if (directory / "plan.json").is_file() else None


def _place(runs: Sequence[Path]) -> Path:
    first = runs[0].with_suffix("") if runs[0].suffix == ".toml" else runs[0]
    return first / "report.html" if len(runs) == 1 else Path("report.html")


def _print(model: ReportModel) -> None:
    from statewise.report.answer import estimate

    for warning in model.warnings:
        say(f"warning: {warning}")
    rows = [
        [
            row["task"],
            row["arm"],
            row["before"],
            row["after"],
            estimate(row["difference"], "+.3f"),
            _p(row),
            row["verdict"],
        ]
        for row in model.contrasts
        if row["against"] == model.versus
    ]
    if rows:
        print_table(["task", "arm", str(model.versus), "score", "difference [95 %]", "p Holm", ""], rows)
        few = few_seeds({row["arm"]: row["seeds"] for row in model.contrasts})
        print("\n".join([*filter(None, [model.evaluated, model.method, few]), ""]))
    else:
        say("nothing to compare: the runs share no task that was evaluated to the end.")
    if model.differences:
        arms = list(model.differences[0]["values"])
        settings = [[row["setting"], *(_value(row["values"].get(arm)) for arm in arms)] for row in model.differences]
        print_table(["setting", *arms], settings)
    columns = ("arm", "seeds", "step", "tokens", "generated_tokens", "teacher_tokens", "flops", "seconds")
    if model.budgets:
        print()
        print_table(columns, [[row[column] for column in columns] for row in model.budgets])


def _p(row: dict[str, Any]) -> str:
    return "-" if row["p_holm"] is None else f"{row['p_holm']:.2g}"


def _value(value: Any) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= 40 else text[:37] + "..."
