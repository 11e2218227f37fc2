"""`statewise study`: arms x seeds under one budget, and what they show."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from statewise.cli.output import estimate, print_json, print_table, say
from statewise.cli.study_progress import Teller
from statewise.errors import CheckFailed, Interrupted
from statewise.estimates import few_seeds, number

if TYPE_CHECKING:
    from statewise.study.plan import Plan

LONG = 200  # letters of an error in a table
app = typer.Typer(help="Plan, run and read studies.", no_args_is_help=True)
FILE = typer.Argument(help="A study's TOML file.")
SETTINGS = typer.Argument(
    None, help="Changes of the study's keys, KEY=VALUE, such as seeds=[0] or budget.max_steps=20."
)
PLACE = typer.Argument(help="A study's TOML file, or its directory.")
OUT = typer.Option(None, help="The study's directory; default: the file's path without .toml.")
JSON = typer.Option(False, "--json", help="Print as JSON.")


@app.command("plan")
def plan(file: Path = FILE, settings: list[str] = SETTINGS, out: Path = OUT, as_json: bool = JSON) -> None:
    """The runs of a study in their order; trains nothing and writes nothing."""
    from statewise.study.plan import make_plan
    from statewise.study.work import is_done

    found = make_plan(file, out, settings or ())
    if as_json:
        return print_json({**found.to_plain(), "out": str(found.out)})
    budget = found.study.budget
    words = "each arm's own" if budget is None else _words(budget.model_dump(exclude_none=True))
    print(f"{found.name}: {_amount(found)} -> {found.out}; budget of an arm: {words}")
    rows = [
        [
            job.arm,
            job.seed,
            _words(job.recipe.budget.model_dump(exclude_none=True)),
            ", ".join(f"{arm}-seed{seed}" for arm, seed in job.needs) or None,
            "done" if is_done(found, job.key) else "to do",
            job.key,
        ]
        for job in found.jobs
    ]
    print_table(["arm", "seed", "budget", "needs", "status", "run"], rows)


@app.command("run")
def run(
    file: Path = FILE,
    settings: list[str] = SETTINGS,
    out: Path = OUT,
    jobs: int = typer.Option(None, "--jobs", min=1, help="Runs at a time; default: as many as the cores hold."),
    on: str = typer.Option("local", "--on", help="local, ray or slurm."),
    as_json: bool = typer.Option(False, "--json", help="Print the table as JSON at the end."),
) -> None:
    """Do what is left of a study. After an interruption or a kill, the same command goes on.

    What failed is tried again. The exit code is 1 where a run failed, after all others have been done.
    """
    from statewise.study.plan import make_plan
    from statewise.study.run import left_to_do, run_study

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found = make_plan(file, out, settings or ())
    say(f"study {found.name}: {_amount(found)} -> {found.out}")
    try:
        with Teller(found, len(left_to_do(found))) as teller:
            failed = run_study(found, jobs=jobs, on=on, tell=teller)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; go on with: {_command(found)}") from None
    _print_table(found.out, None, as_json)
    _report(found.out)
    if failed:
        lines = "\n".join(f"  {key}: {error}" for key, error in failed.items())
        planned = sum(key in found.by_key for key in failed)
        raise CheckFailed(f"{found.name}: {planned} of {len(found.jobs)} runs failed:\n{lines}")


@app.command("status")
def status(place: Path = PLACE, as_json: bool = JSON) -> None:
    """How far each run is."""
    from statewise.study.results import read_study
    from statewise.study.table import status as rows_of

    rows = rows_of(read_study(place))
    if as_json:
        return print_json(rows)
    columns = ("arm", "seed", "status", "step", "loss", "seconds", "error")
    print_table(columns, [[_short(row.get(column)) for column in columns] for row in rows])
    if any(row["error"] for row in rows):
        own = place if place.suffix == ".toml" else place.with_name(f"{place.resolve().name}.toml")
        file = own if own.is_file() else f"FILE.toml --out {place}"
        say(f"To go on, mend the cause and run `statewise study run {file}`: what failed or waits is tried again.")


@app.command("table")
def table(
    place: Path = PLACE,
    vs: str = typer.Option(None, "--vs", help="The arm that others are compared with; default: the study's `versus`."),
    as_json: bool = JSON,
) -> None:
    """Target, retention and forgetting of every arm, with paired 95 % intervals, and what it took."""
    _print_table(place, vs, as_json)


@app.command("report")
def report(
    place: Path = PLACE,
    out: Path = typer.Option(None, help="The HTML file; default: report.html in the study's directory."),
    vs: str = typer.Option(None, "--vs", help="The arm that others are compared with; default: the study's `versus`."),
) -> None:
    """Write the study's report, one HTML file that opens offline."""
    from statewise.study.reporting import study_report
    from statewise.study.results import read_study

    print(study_report(read_study(place), out, vs))


def _report(out: Path) -> None:
    from statewise.study.reporting import study_report
    from statewise.study.results import read_study

    say(f"report: {study_report(read_study(out))}")


def _print_table(place: Path, vs: str | None, as_json: bool) -> None:
    from statewise.study.results import read_study
    from statewise.study.table import table as rows_of

    study = read_study(place)
    rows = rows_of(study, vs)
    if as_json:
        return print_json({"name": study.plan["name"], "target": study.plan["target"], "rows": rows})
    if not any(row.get("scores") for row in rows):
        return say("no run is done yet")
    target, retention = study.plan["target"], [t for t, purpose in study.purposes.items() if purpose == "retention"]
    versus = next((row["versus"]["arm"] for row in rows if row.get("versus")), None)
    columns = ["arm", "seeds", target, "gain [95 %]", *([f"against {versus}"] if versus else [])]
    columns += [*(f"F {task}" for task in retention), "retention", "seconds", "trained", "sampled", "teacher"]
    print_table(columns, [_cells(row, target, retention, versus) for row in rows])
    print("means over seeds; F = base - post; retention: mean of post / base over tasks; tokens and seconds a run")
    if few := few_seeds({row["arm"]: row["seeds"] for row in rows if row["seeds"]}):
        print(few)


def _cells(row: dict[str, Any], target: str, retention: list[str], versus: str | None) -> list[Any]:
    seeds = f"{row['seeds']}/{row['planned']}" if "planned" in row else None
    if not row.get("scores"):
        return [row["arm"], seeds, row["status"], *[None] * (len(retention) + 6 + bool(versus))]
    forgotten = row.get("forgetting", {})
    return [
        row["arm"],
        seeds,
        number(row["scores"][target], ".3f"),
        estimate(row.get("gain")),
        *([estimate(row.get("versus"))] if versus else []),
        *(estimate(forgotten.get(task)) for task in retention),
        estimate(row.get("retention")),
        *(_whole(row.get(name)) for name in ("seconds", "trained_tokens", "generated_tokens", "teacher_tokens")),
    ]


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _words(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {value:g}" for key, value in values.items())


def _command(plan: Plan) -> str:
    return shlex.join(["statewise", "study", "run", str(plan.file), *plan.overrides, "--out", str(plan.out)])


def _amount(plan: Plan) -> str:
    arms = len({job.arm for job in plan.jobs})
    return f"{len(plan.jobs)} run(s), {arms} arm(s)"


def _short(value: Any) -> Any:
    """The first line of a text, cut where it is very long."""
    if not isinstance(value, str):
        return value
    line = value.partition("\n")[0]
    return line if len(line) <= LONG else line[: LONG - 3] + "..."
