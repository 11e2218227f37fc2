"""`statewise runs`: what is in run directories."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from statewise.cli.output import interval, print_json, print_table
from statewise.errors import RunError
from statewise.estimates import number

if TYPE_CHECKING:
    from statewise.run import RunDir

app = typer.Typer(help="List and show runs.", no_args_is_help=True)
LAST = {  # metrics of the last step that people are shown, in words
    "loss": "loss",
    "reward": "mean reward",
    "score": "score",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens": "trained tokens",
    "total_tokens": "trained tokens in all",
    "step_seconds": "seconds",
}
JSON = typer.Option(False, "--json", help="Print as JSON.")


@app.command("list")
def list_runs(directory: Path = typer.Argument(Path("runs"), help="Where runs are."), as_json: bool = JSON) -> None:
    """The runs in a directory and in its directories, newest first."""
    files = [file for pattern in ("run.json", "*/run.json", "*/*/run.json") for file in directory.glob(pattern)]
    runs = sorted(
        (_summary_or_fault(file.parent) for file in files), key=lambda run: run["created"] or "", reverse=True
    )
    if as_json:
        return print_json(runs)
    columns = ("run", "status", "recipe", "step", "loss", "seconds", "created")
    rows = [[{**run, **run["last"]}.get(column) for column in columns] for run in runs]
    print_table(columns, rows)


def _summary_or_fault(path: Path) -> dict[str, Any]:
    """One run that can't be read must not hide the others."""
    from statewise.run import RunDir

    try:
        return summary(RunDir.open(path))
    except RunError as error:
        return {"run": str(path), "status": "unreadable", "error": str(error), "created": "", "last": {}}


@app.command("show")
def show(run: Path = typer.Argument(help="A run directory."), as_json: bool = JSON) -> None:
    """Status, method, last metrics, and every task before and after."""
    from statewise.run import RunDir

    found = summary(RunDir.open(run))
    if as_json:
        return print_json(found)
    print_summary(found)


def summary(run: RunDir) -> dict[str, Any]:
    """The facts of a run, as plain values."""
    info = run.info
    trained = [row for row in run.metrics() if not any(key.startswith("eval/") for key in row)]
    last, checkpoints = trained[-1] if trained else {}, run.checkpoints()
    kept = (
        "run",
        "recipe",
        "recipe_hash",
        "created",
        "started",
        "ended",
        "error",
        "method",
        "data",
        "versions",
        "hardware",
        "warnings",
    )
    return {
        **{key: info.get(key) for key in kept},
        "run": str(run.path),
        "status": run.status,
        "step": last.get("step", 0),
        "seconds": _seconds(info),
        "last": last,
        "evals": run.evals(),
        "checkpoints": list(checkpoints),
        "last_checkpoint": next((str(path) for path in reversed(checkpoints.values())), None),
    }


def _seconds(info: dict[str, Any]) -> int | None:
    if not info.get("started") or not info.get("ended"):
        return None
    return int((datetime.fromisoformat(info["ended"]) - datetime.fromisoformat(info["started"])).total_seconds())


def print_summary(found: dict[str, Any]) -> None:
    """A summary for people."""
    took = "" if found["seconds"] is None else f", {found['seconds']} s"
    print(f"{found['run']}: {found['status']} at step {found['step']}{took}")
    if found["error"] and found["status"] != "completed":
        print(f"error:     {found['error']}")
    for warning in found["warnings"] or []:
        print(f"warning:   {warning}")
    print("\n".join(found["method"] or []))
    if found["last"]:
        _print_last(found["last"])
    print(f"saved:     {', '.join(f'step {s}' for s in found['checkpoints']) or 'no checkpoint'}")
    if found["checkpoints"]:
        print(f"last:      {found['last_checkpoint']}")
    if found["evals"]:
        _print_evals(found["evals"])


def _print_last(row: dict[str, Any]) -> None:
    """What matters of the last step's metrics, one under the other."""
    told = {words: row[name] for name, words in LAST.items() if row.get(name) is not None}
    width = max(map(len, told), default=0)
    lines = [f"{words.ljust(width)}  {number(v) if isinstance(v, float) else f'{v:,}'}" for words, v in told.items()]
    print("last step: " + "\n           ".join(lines))


def _print_evals(evals: dict[int, dict[str, dict[str, float]]]) -> None:
    """A row a task: its score at the first and the last evaluation."""
    first, last = min(evals), max(evals)
    steps = [first] if first == last else [first, last]
    tasks = list(dict.fromkeys(task for step in steps for task in evals[step]))
    print()
    rows = [[task, *(interval(evals[step].get(task)) for step in steps)] for task in tasks]
    print_table(["task", *(f"step {step}" for step in steps)], rows)
