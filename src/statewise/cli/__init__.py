"""The command line.

Exit codes: 0 done, 1 a check or gate failed, 2 bad input, 3 interrupted and resumable, 70 a fault of statewise itself.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

import typer

import statewise
from statewise.cli import (
    check,
    detect,
    doctor,
    drift,
    evaluate,
    filter,
    geometry,
    ledger,
    merge,
    power,
    realign,
    recipe,
    report,
    runs,
    sample,
    score,
    study,
    tiny,
    train,
)
from statewise.errors import StatewiseError, place

BAD_INPUT, OUR_FAULT = 2, 70
FAULT = "This is a fault of statewise or of a plug-in; --debug shows where it happened."
MENDS = {
    errno.ENOSPC: "free some space and give the same command again; what was finished is kept",
    errno.EDQUOT: "free some space and give the same command again; what was finished is kept",
    errno.EFBIG: "raise the limit on the size of files and give the same command again",
    errno.EACCES: "check its permissions, or choose another place",
    errno.EROFS: "choose a place that can be written to",
    errno.EISDIR: "expected a file",
    errno.EEXIST: "expected a directory, or nothing yet",
    errno.ENOTDIR: "a part of the path is a file, not a directory",
}

app = typer.Typer(
    name="statewise",
    help="Train, measure and compare language-model post-training by whose states the model is trained on.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
app.command("train", context_settings={"ignore_unknown_options": True})(train.command)
app.command("eval")(evaluate.command)
app.command("ledger")(ledger.command)
app.command("drift")(drift.command)
app.command("power")(power.command)
app.command("score")(score.command)
app.command("detect")(detect.command)
app.command("filter")(filter.command)
app.command("sample", context_settings={"ignore_unknown_options": True})(sample.command)
app.command("realign")(realign.command)
app.command("doctor", context_settings={"ignore_unknown_options": True})(doctor.command)
app.command("merge")(merge.command)
app.command("geometry")(geometry.command)
app.add_typer(recipe.app, name="recipe")
app.command("check")(check.command)
app.add_typer(runs.app, name="runs")
app.command("report")(report.report)
app.command("compare")(report.compare)
app.add_typer(study.app, name="study")
app.add_typer(tiny.app, name="tiny")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"statewise {statewise.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks (anywhere, or STATEWISE_DEBUG=1)."),
) -> None:
    """Options of every command; `main` has taken --debug out, so that it may stand anywhere."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code; errors are one message on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words or os.environ.get("STATEWISE_DEBUG", "") not in ("", "0")
    try:
        app(args=[w for w in words if w != "--debug"], prog_name="statewise")
    except Exception as error:
        if debug:
            raise
        sys.exit(_explain(error))


def _explain(error: Exception) -> int:
    """Say what went wrong and return the exit code."""
    if isinstance(error, StatewiseError):
        print(f"statewise: {error}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, OSError):
        print(f"statewise: {_of_files(error)}", file=sys.stderr)
        return BAD_INPUT
    where = place(error)
    fault = f"It comes from {where}; --debug shows the calls." if where else FAULT
    print(
        f"statewise: unexpected {type(error).__name__}: {error}\n{fault}",
        file=sys.stderr,
    )
    return OUR_FAULT


def _of_files(error: OSError) -> str:
    """Which file, what happened, and how to mend it."""
    if error.errno is None:
        return str(error)
    where = f"{error.filename}: " if error.filename is not None else ""
    mend = MENDS.get(error.errno)
    return f"{where}{error.strerror}{'; ' + mend if mend else ''}."
