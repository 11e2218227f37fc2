"""Printing: tables for people, JSON for programs (nothing else on stdout), messages on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from statewise import estimates
from statewise.files import to_json


def say(text: str) -> None:
    """A message on stderr, from the first process of a distributed run only."""
    if is_first():
        print(text, file=sys.stderr, flush=True)


def is_first() -> bool:
    """Whether this is rank 0, or the only process."""
    return os.environ.get("RANK", "0") == "0"


def print_json(value: Any) -> None:
    print(to_json(value, indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Columns aligned by their widest cell, numbers to the right."""
    texts = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(column), *(len(row[i]) for row in texts), 0) for i, column in enumerate(columns)]
    right = [all(isinstance(row[i], int | float) or row[i] is None for row in rows) for i in range(len(columns))]
    for line in (list(columns), *texts):
        cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True))
        print("  ".join(cells).rstrip())


def _cell(value: Any) -> str:
    if value is None or value != value:  # not a number
        return "-"
    return estimates.number(value) if isinstance(value, float) else str(value)


def estimate(value: dict[str, float] | None) -> str:
    """`0.512 [0.470, 0.553]` of `value`, `low` and `high`."""
    return "-" if value is None else estimates.interval(value["value"], value.get("low"), value.get("high"))


def interval(score: dict[str, float] | None) -> str:
    """`0.512 [0.470, 0.553]` of `mean`, `low` and `high`."""
    return "-" if score is None else estimates.interval(score.get("mean"), score.get("low"), score.get("high"))
