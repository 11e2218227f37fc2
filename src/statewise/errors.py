"""The errors that a user can meet. Each message says what was received, what was expected and how to mend it."""

import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

LIBRARY = Path(traceback.__file__).parent


class StatewiseError(Exception):
    """Base of all errors that statewise raises on purpose; `exit_code` is what the CLI ends with."""

    exit_code = 2


class RecipeError(StatewiseError):
    """A recipe, an override or a component setting is wrong, or the combination has no meaning."""


class DataError(StatewiseError):
    """A data file, a row or a sample can't be used; the message names file, line and field."""


class EndpointError(StatewiseError):
    """A server or an engine did not answer, or not with what it must give."""


class CheckpointError(StatewiseError):
    """A checkpoint is missing, incomplete or does not fit the run."""


class RunError(StatewiseError):
    """A run directory is in use, or not a run directory."""


class CheckFailed(StatewiseError):
    """A check or a gate ran and said no."""

    exit_code = 1


class NonFiniteLoss(StatewiseError):
    """The loss became NaN or infinite; the run stops before the update and names the samples."""

    exit_code = 1


class Interrupted(StatewiseError):
    """The run was asked to stop; it can be resumed."""

    exit_code = 3


class MissingProgram(StatewiseError):
    """A program that is not a Python package is not installed, or does not work."""


class MissingExtra(StatewiseError):
    """An optional dependency is not installed; the message holds the install line."""

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(f"{purpose} needs the package '{package}'. Install it with: pip install 'statewise[{extra}]'")


def place(error: BaseException) -> str:
    """`file.py:12` of the innermost line that is in no installed package, or nothing: where a user's own code failed."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_own(Path(f.filename))]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def told(error: BaseException) -> str:
    """`KeyError: 'x' (mine.py:12)`, the place where it is the user's own."""
    where = place(error)
    return f"{type(error).__name__}: {error}{f' ({where})' if where else ''}"


def _is_own(file: Path) -> bool:
    packages = {"site-packages", "dist-packages"} & set(file.parts)
    return file.is_file() and not packages and not {Path(__file__).parent, LIBRARY} & set(file.parents)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as `; did you mean 'probability'?`, or the list of what is known."""
    known = sorted(known)
    within = sorted((k for k in known if len(name) > 2 and name in k), key=len)
    close = get_close_matches(name, known, n=1, cutoff=0.6) or within
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(known)}" if known else ""
