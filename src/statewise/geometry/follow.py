"""Following runs over their checkpoints: a worker a matrix, results kept as they come, so that a killed one goes on.

OUT/trajectory.json       what is followed with which choices, means over matrices at every point, lock times
OUT/trajectory.parquet    a row a run, matrix and point
OUT/parts/*.parquet       a file a run and matrix; those that are there are not computed again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from statewise.errors import RecipeError, RunError
from statewise.files import atomic_write, is_unused, to_json
from statewise.geometry.table import parquet, read_parquet
from statewise.geometry.trajectory import Choices, Row, Trajectory, locks, means, measure_matrix
from statewise.geometry.workers import each

SCHEMA = 1
Progress = Callable[[int, int, str], None]
Job = tuple[int, int]  # trajectory and matrix


def key_of(trajectories: Sequence[Trajectory], choices: Choices) -> str:
    """Of the files and of the choices that make the numbers."""
    files = [[c.fingerprint for c in (t.start, *t.points)] for t in trajectories]
    named = [[m.name for m in t.matrices] for t in trajectories]
    text = to_json([SCHEMA, files, named, [t.label for t in trajectories], asdict(choices)])
    return sha256(text.encode()).hexdigest()[:12]


def follow(
    trajectories: Sequence[Trajectory],
    choices: Choices,
    out: str | Path,
    workers: int = 1,
    progress: Progress = lambda done, total, name: None,
) -> list[Row]:
    """The rows of all runs, matrices and points, in order, written under `out`.

    Raises RecipeError for two runs of one name, RunError where `out` holds something else.
    """
    labels = [t.label for t in trajectories]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise RecipeError(f"--trajectory: {twice} is given twice; give each run once.")
    parts = _open(Path(out), key_of(trajectories, choices))
    jobs = [(t, m) for t, trajectory in enumerate(trajectories) for m in range(len(trajectory.matrices))]
    files = {job: parts / f"{job[0]:02d}_{job[1]:04d}.parquet" for job in jobs}
    done = {job: read_parquet(file) for job, file in files.items() if file.is_file()}
    left = [job for job in jobs if job not in done]
    for job, rows in each(_measure, (trajectories, choices), left, workers):
        done[job] = rows
        atomic_write(files[job], parquet(rows))
        progress(len(done), len(jobs), trajectories[job[0]].matrices[job[1]].name)
    rows = [row for job in jobs for row in done[job]]
    atomic_write(Path(out) / "trajectory.parquet", parquet(rows))
    atomic_write(Path(out) / "trajectory.json", to_json(summary(trajectories, choices, rows), indent=1) + "\n")
    return rows


def summary(trajectories: Sequence[Trajectory], choices: Choices, rows: Sequence[Row]) -> dict[str, Any]:
    """What trajectory.json holds: `key`, `choices`, and for each run its facts, `points` and `locks`."""
    runs = []
    for trajectory in trajectories:
        own = [row for row in rows if row["run"] == trajectory.label]
        runs.append({**trajectory.facts(), "locks": locks(own, choices.threshold), "means": means(own)})
    return {"schema": SCHEMA, "key": key_of(trajectories, choices), "choices": asdict(choices), "runs": runs}


def _open(out: Path, key: str) -> Path:
    mark = out / "parts" / "key"
    if mark.is_file():
        if mark.read_text(encoding="utf-8") != key:
            raise RunError(
                f"{out}: holds other trajectories (or their checkpoints have changed since); choose another --out, or "
                "remove it."
            )
    elif not is_unused(out):
        raise RunError(f"{out}: is not empty and holds no trajectory; choose another --out.")
    (out / "parts").mkdir(parents=True, exist_ok=True)
    atomic_write(mark, key)
    return out / "parts"


def _measure(shared: tuple[Sequence[Trajectory], Choices], job: Job) -> list[Row]:
    trajectories, choices = shared
    return measure_matrix(trajectories[job[0]], job[1], choices)
