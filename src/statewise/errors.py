"""The errors that a user can meet. Each message says what was received, what was expected and how to mend it."""

from collections.abc import Iterable
from difflib import get_close_matches


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


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as `; did you mean 'probability'?`, or the list of what is known."""
    known = sorted(known)
    within = sorted((k for k in known if len(name) > 2 and name in k), key=len)
    close = get_close_matches(name, known, n=1, cutoff=0.6) or within
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(known)}" if known else ""
