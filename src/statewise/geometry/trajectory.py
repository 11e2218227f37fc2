"""A run's update over its checkpoints: norms, spectra and subspaces of D_t = W_t - W_0 and of the parts between.

Subspaces are of right singular vectors, one matrix at a time; see `statewise.geometry.locking` for the nulls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from statewise.errors import CheckpointError
from statewise.geometry.checkpoints import Checkpoint, open_checkpoint, step_directories
from statewise.geometry.locking import directions, lock_index, partial_sums, shuffled, unrelated
from statewise.geometry.matrices import Matrix, Selection, match
from statewise.stats.spectra import hill, relative_gap, stable_rank, subspace_similarity, top_energy

if TYPE_CHECKING:
    import torch

Row = dict[str, Any]
ENERGIES = (1, 4, 16)
CURVES = ("sim_end", "sim_end_shuffled", "sim_end_unrelated")
IDENTITY = ("run", "matrix", "module", "layer", "entries", "step", "progress")


@dataclass(frozen=True)
class Choices:
    """k: of Sim_K; hill_k: singular values in the Hill estimate; draws: of each null; threshold: Sim_K of a locked subspace."""

    k: int = 16
    hill_k: int = 16
    draws: int = 4
    threshold: float = 0.9
    seed: int = 0


@dataclass(frozen=True)
class Trajectory:
    """A start and what came of it, in order. `steps`: of the points; progress is step / last step."""

    label: str
    start: Checkpoint
    points: tuple[Checkpoint, ...]
    steps: tuple[int, ...]
    matrices: tuple[Matrix, ...]
    notes: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "start": self.start.label,
            "points": [p.label for p in self.points],
            "steps": list(self.steps),
            "num_matrices": len(self.matrices),
            "notes": list(self.notes),
        }


def of_run(run: str | Path, selection: Selection) -> Trajectory:
    """Of a run's checkpoints, from the model that it was trained from. Raises CheckpointError where it has less than two."""
    from statewise.run import RunDir

    model = RunDir.open(run).recipe().model
    adapter = model.adapter.path if model.adapter is not None else None
    steps = step_directories(Path(run))
    if len(steps) < 2:
        raise CheckpointError(
            f"{run}: has {len(steps)} checkpoint(s), and a trajectory needs two; train with checkpoint.every and "
            "checkpoint.keep_every, which keep some in between."
        )
    return _matched(str(run), adapter or model.path, list(steps.values()), list(steps), selection)


def of_list(names: Sequence[str], selection: Selection) -> Trajectory:
    """Of checkpoints in order, the first one the start. Raises CheckpointError for less than three."""
    if len(names) < 3:
        raise CheckpointError(
            f"--trajectory: received {len(names)} checkpoints, expected a start and two or more points."
        )
    return _matched(names[-1], names[0], list(names[1:]), list(range(1, len(names))), selection)


def _matched(
    label: str, start: str, points: Sequence[str | Path], steps: Sequence[int], selection: Selection
) -> Trajectory:
    opened = [open_checkpoint(name) for name in (start, *points)]
    found = match(opened, selection)
    return Trajectory(label, opened[0], tuple(opened[1:]), tuple(steps), tuple(found.matrices), tuple(found.notes))


def measure_matrix(trajectory: Trajectory, index: int, choices: Choices) -> list[Row]:
    """A row a point of the trajectory, for one matrix. Raises CheckpointError where nothing moved."""
    matrix = trajectory.matrices[index]
    start = before = matrix.of(trajectory.start).rows().double()
    parts = []
    for point in trajectory.points:
        now = matrix.of(point).rows().double()
        parts.append((now - before).float())
        before = now
    rows = list(_rows(parts, float(start.square().sum()) ** 0.5, choices))
    random = np.random.default_rng([choices.seed, index])
    for name, null in (("shuffled", shuffled), ("unrelated", unrelated)) if choices.draws else ():
        draws = [null(parts, choices.k, random) for _ in range(choices.draws)]
        for at, row in enumerate(rows):
            row[f"sim_end_{name}"] = float(np.mean([draw[at] for draw in draws]))
    steps, last = trajectory.steps, trajectory.steps[-1]
    values = (trajectory.label, matrix.name, matrix.module, matrix.layer, matrix.entries)
    facts = dict(zip(IDENTITY, values, strict=False))
    return [{**facts, "step": step, "progress": step / last, **row} for step, row in zip(steps, rows, strict=True)]


def _rows(parts: Sequence[torch.Tensor], start_norm: float, choices: Choices) -> Iterator[Row]:
    """Of the update up to every point, and of the part before it."""
    k = choices.k
    wanted = max(k + 1, choices.hill_k, *ENERGIES)
    found = [(total, *directions(total, wanted)) for total in partial_sums(parts)]
    end = found[-1][2][:, :k]
    last: np.ndarray | None = None
    for part, (total, s, v) in zip(parts, found, strict=True):
        norm, energy = float(part.double().norm()), float(total.double().square().sum())
        basis = directions(part, k)[1]
        yield {
            "delta_norm": energy**0.5,
            "relative_norm": energy**0.5 / start_norm if start_norm else None,
            "part_norm": norm,
            "stable_rank": stable_rank(s, energy),
            "hill": hill(s, min(choices.hill_k, len(s))),
            **{f"top_{i}_energy": top_energy(s, i, energy) for i in sorted({*ENERGIES, k})},
            "gap": relative_gap(s, k) if len(s) > k else None,
            "sim_end": subspace_similarity(v[:, :k], end),
            "sim_part": None if last is None else subspace_similarity(basis, last),
            "sim_part_end": subspace_similarity(basis, end),
            "sim_random": end.shape[1] / end.shape[0],
        }
        last = basis


def locks(rows: Sequence[Row], threshold: float) -> dict[str, float | None]:
    """The progress from which on a curve's mean over matrices stays at the threshold, None where it never does.

    `sim_end`: of the run; `_shuffled`, `_unrelated`: of its nulls; `median`: over matrices, of each one's own.
    """
    points = sorted({row["progress"] for row in rows})
    found: dict[str, float | None] = {}
    for name in CURVES:
        if rows[0].get(name) is not None:
            curve = [float(np.mean([r[name] for r in rows if r["progress"] == p])) for p in points]
            found[name] = _at(points, lock_index(curve, threshold))
    each = []
    for matrix in dict.fromkeys(row["matrix"] for row in rows):
        own = sorted((row for row in rows if row["matrix"] == matrix), key=lambda row: row["step"])
        at = lock_index([row["sim_end"] for row in own], threshold)
        each += [] if at is None else [points[at]]
    return {**found, "median": float(np.median(each)) if each else None}


def _at(points: Sequence[float], index: int | None) -> float | None:
    return None if index is None else points[index]


def means(rows: Sequence[Row]) -> list[Row]:
    """A row a point: every number's plain mean over matrices, and, as `_weighted`, that by parameters."""
    found = []
    for step in sorted({row["step"] for row in rows}):
        here = [row for row in rows if row["step"] == step]
        out: Row = {"run": here[0]["run"], "step": step, "progress": here[0]["progress"], "num_matrices": len(here)}
        for name in here[0]:
            if name not in IDENTITY:
                out |= _both_means(name, here)
        found.append(out)
    return found


def _both_means(name: str, rows: Sequence[Row]) -> Row:
    known = [(row[name], row["entries"]) for row in rows if row[name] is not None and np.isfinite(row[name])]
    if not known:
        return {name: None, f"{name}_weighted": None}
    values, weights = np.array(known, dtype=float).T
    return {name: float(values.mean()), f"{name}_weighted": float(values @ weights / weights.sum())}
