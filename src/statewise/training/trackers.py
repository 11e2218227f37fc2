"""Experiment trackers beside metrics.jsonl, through accelerate's: tensorboard, wandb, trackio."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from statewise.errors import MissingExtra, RecipeError, nearest

NAMES = ("tensorboard", "wandb", "trackio")
PROJECT = "statewise"


class Trackers:
    """Opened trackers; `log` gives each the row of a step, `close` ends them."""

    def __init__(self, trackers: list[Any]):
        self._trackers = trackers

    def log(self, row: dict[str, Any], step: int) -> None:
        """Finite numbers of the row, at `step`."""
        values = {k: v for k, v in row.items() if isinstance(v, int | float) and math.isfinite(v) and k != "step"}
        for tracker in self._trackers:
            tracker.log(values, step=step)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.finish()
        self._trackers = []


def open_trackers(names: Sequence[str], run_dir: Path, recipe: dict[str, Any]) -> Trackers:
    """Start the trackers `names` for a run; `recipe` (nested plain values) is stored as its configuration.

    Raises RecipeError for an unknown name, MissingExtra where the package is not installed.
    """
    for name in names:
        if name not in NAMES:
            raise RecipeError(f"--track: unknown tracker '{name}'{nearest(name, NAMES)}")
        if importlib.util.find_spec(name) is None:
            raise MissingExtra(name, name, f"tracking with {name}")
    return Trackers([_start(name, run_dir, recipe) for name in dict.fromkeys(names)])


def _start(name: str, run_dir: Path, recipe: dict[str, Any]) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    if name == "tensorboard":
        tracker = LOGGER_TYPE_TO_CLASS[name]("tensorboard", logging_dir=run_dir)
    else:
        tracker = LOGGER_TYPE_TO_CLASS[name](PROJECT, name=run_dir.name)
    tracker.start()
    tracker.store_init_configuration(flat(recipe))
    return tracker


def flat(nested: Any, prefix: str = "") -> dict[str, Any]:
    """{"optim.lr": 1e-4, ...}: the leaves of nested dicts and lists, None as text."""
    pairs = nested.items() if isinstance(nested, dict) else enumerate(nested)
    out: dict[str, Any] = {}
    for key, value in pairs:
        path = f"{prefix}{key}"
        if isinstance(value, dict | list | tuple):
            out |= flat(value, f"{path}.")
        else:
            out[path] = value if isinstance(value, bool | int | float | str) else str(value)
    return out
