"""Where on its course an end is measured: at the end itself, or where it first was as far from the start as all others got.

Norms grow with the update, and most of what is measured grows with norms. At one norm they can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from statewise.errors import CheckpointError
from statewise.geometry.checkpoints import Checkpoint, Weights, open_checkpoint, step_directories
from statewise.geometry.matrices import Matrix, Selection, match
from statewise.geometry.origin import Delta, towards


@dataclass(frozen=True)
class Place:
    """W = A + share (B - A) of two checkpoints; `share` 1 is B."""

    before: Checkpoint
    after: Checkpoint
    share: float

    def of(self, matrix: Matrix) -> Weights:
        """The values of a matrix there."""
        if self.share == 1:
            return matrix.of(self.after)
        return towards(matrix.of(self.before), matrix.of(self.after), self.share)

    def facts(self) -> dict[str, Any]:
        return {"between": [self.before.label, self.after.label], "share": self.share}


def ends(checkpoints: Sequence[Checkpoint]) -> tuple[Place, ...]:
    """Every checkpoint after the first, as it is."""
    return tuple(Place(checkpoints[0], end, 1.0) for end in checkpoints[1:])


def at_one_norm(
    checkpoints: Sequence[Checkpoint], matrices: Sequence[Matrix], selection: Selection
) -> tuple[tuple[Place, ...], list[str]]:
    """Where each course first reaches the least of the final ‖D‖_F, over all matrices together; and a note for each.

    The course of a run goes in straight lines from the start through the checkpoints it kept, that of another end
    straight to it. Raises CheckpointError where an end does not differ from the start.
    """
    start = checkpoints[0]
    courses = [(start, *_kept(start, end, selection)) for end in checkpoints[1:]]
    found = iter(_distances(start, [one for course in courses for one in course[1:]], matrices))
    norms = [[0.0, *islice(found, len(course) - 1)] for course in courses]
    for end, reached in zip(checkpoints[1:], norms, strict=True):
        if not reached[-1] > 0:
            raise CheckpointError(f"{end.label}: does not differ from the start, so that it has no norm to be scaled.")
    least = min(reached[-1] for reached in norms)
    places, notes = [], []
    for course, reached in zip(courses, norms, strict=True):
        place = _first(course, reached, least, matrices)
        places.append(place)
        way = f"from {_short(place.before)} to {_short(place.after)}"
        where = "at its end" if place.share == 1 else f"{place.share:.3g} of the way {way}"
        notes.append(f"{course[-1].label}: D of norm {reached[-1]:.4g}; measured at norm {least:.4g}, {where}")
    return tuple(places), notes


def _kept(start: Checkpoint, end: Checkpoint, selection: Selection) -> list[Checkpoint]:
    """The checkpoints of a run that was given as a whole, in order, else the end alone."""
    run = end.path.parent.parent
    steps = step_directories(run) if (run / "run.json").is_file() and Path(end.label).resolve() == run.resolve() else {}
    earlier = [open_checkpoint(path) for path in steps.values() if path.resolve() != end.path.resolve()]
    match((start, *earlier), selection)
    return [*earlier, end]


def _distances(one: Checkpoint, others: Sequence[Checkpoint], matrices: Sequence[Matrix]) -> list[float]:
    """‖W_other - W_one‖_F of each over all matrices together; every tensor is read once."""
    squares = [0.0] * len(others)
    for matrix in matrices:
        weights = matrix.of(one)
        for index, other in enumerate(others):
            squares[index] += Delta.of(weights, matrix.of(other)).norm ** 2
    return [math.sqrt(square) for square in squares]


def _first(course: Sequence[Checkpoint], norms: Sequence[float], wanted: float, matrices: Sequence[Matrix]) -> Place:
    """Where the course first has the wanted norm: ‖D + t P‖ = wanted on the part P that ends at or beyond it."""
    index = next(i for i, norm in enumerate(norms) if norm >= wanted)
    before, after, low, high = course[index - 1], course[index], norms[index - 1], norms[index]
    if high == wanted:
        return Place(before, after, 1.0)
    (part,) = _distances(before, [after], matrices)
    inner = (high**2 - low**2 - part**2) / 2  # <D, P>
    root = math.sqrt(inner**2 + part**2 * (wanted**2 - low**2))
    return Place(before, after, (root - inner) / part**2)


def _short(checkpoint: Checkpoint) -> str:
    name = checkpoint.path.name
    return name if name.startswith("step_") else checkpoint.label
