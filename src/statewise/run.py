"""A run directory: the only interface after training.

    recipe.toml        the recipe, as it was resolved
    run.json           schema, status, versions, seed, hardware, times, data counts, error
    metrics.jsonl      a row a step, and a row an evaluation (keys "eval/...")
    evals/step_*/      per-example records and summaries of the evaluations
    rollouts/          rollouts that were kept
    diagnostics/       tables computed later
    checkpoints/step_*/

A run that crashed is a valid run directory with its status and error.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from statewise import environment
from statewise.errors import RunError
from statewise.files import atomic_write, json_row, naming, to_json
from statewise.recipe import Recipe

SCHEMA = 1
STATUSES = ("created", "running", "completed", "failed", "interrupted")
PARTS = ("rollouts", "evals", "diagnostics", "checkpoints")
LOCK_TRIES, LOCK_PAUSE_SECONDS = 5, 0.05  # a reader that looks whether a run is alive holds the lock for microseconds


class RunDir:
    """Opened with `create` or `open`; a writer holds `lock()`, readers need none."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.data_are_settled = False  # a run that goes on from a checkpoint has met all its data before

    def __repr__(self) -> str:
        """Directory, recipe, steps and state, as they are now."""
        try:
            steps = max((row.get("step", 0) for row in self.metrics()), default=0)
            return f"RunDir({str(self.path)!r}: {self.info.get('recipe')}, {steps} steps, {self.status})"
        except (RunError, OSError):
            return f"RunDir({str(self.path)!r}: unreadable)"

    @classmethod
    def create(cls, path: str | Path, recipe: Recipe) -> RunDir:
        """A new run in a new or empty directory. Raises RunError where there is a run, or anything else."""
        run = cls(path)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{path}: can't be made a run directory: {error.strerror}. Choose another --out.") from None
        run._refuse_occupied()
        try:
            with (run.path / "recipe.toml").open("x", encoding="utf-8") as file:  # of two processes one succeeds
                file.write(recipe.to_toml())
        except FileExistsError:
            raise RunError(f"{path}: another process is making a run here; choose another --out.") from None
        for part in PARTS:
            (run.path / part).mkdir(exist_ok=True)
        atomic_write(run.path / "run.json", to_json(_first_facts(recipe), indent=2) + "\n")
        return run

    def _refuse_occupied(self) -> None:
        if self._is_stillborn():
            shutil.rmtree(self.path)
            self.path.mkdir()
        if (self.path / "run.json").is_file():
            raise RunError(
                f"{self.path}: holds a run (status {self.status}). Continue it with --resume {self.path}, or choose "
                "another --out."
            )
        found = sorted(p.name for p in self.path.iterdir() if not (p.name.startswith(".") and p.name.endswith(".tmp")))
        if found:
            raise RunError(f"{self.path}: is not empty (it holds {found[0]}) and is no run; choose another --out.")

    def _is_stillborn(self) -> bool:
        """Whether a run failed here before its first row and checkpoint, so that a mended recipe may take its place."""
        if not (self.path / "run.json").is_file() or self.status != "failed":
            return False
        return {p.name for p in self.path.iterdir()} <= {"recipe.toml", "run.json", "lock", *PARTS} and not any(
            file.is_file() for part in PARTS for file in (self.path / part).rglob("*")
        )

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """An existing run. Raises RunError where the directory is none, or of a later schema."""
        run = cls(path)
        for name in ("run.json", "recipe.toml"):
            if not (run.path / name).is_file():
                raise RunError(f"{path}: is no run directory: it has no {name}. Give what `train --out` wrote.")
        schema = run.info.get("schema")
        if schema != SCHEMA:
            raise RunError(f"{path}/run.json: schema is {schema!r}, and this version of statewise reads {SCHEMA}.")
        return run

    @property
    def info(self) -> dict[str, Any]:
        """What run.json holds now."""
        file = self.path / "run.json"
        try:
            info = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"{file}: can't be read: {error}") from None
        if not isinstance(info, dict):
            raise RunError(f"{file}: received {type(info).__name__}, expected a JSON object.")
        return info

    @property
    def status(self) -> str:
        """The status in run.json; "interrupted" also where it says running and no process holds the lock."""
        status = str(self.info.get("status"))
        return "interrupted" if status == "running" and not self.is_locked() else status

    @property
    def recipe_hash(self) -> str:
        return str(self.info["recipe_hash"])

    def recipe(self, overrides: list[str] | None = None) -> Recipe:
        """The run's recipe; relative paths in it start where the original recipe file was."""
        import tomllib

        info, file = self.info, self.path / "recipe.toml"
        try:
            plain = tomllib.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RunError(f"{file}: is not valid TOML: {error}") from None
        return Recipe.from_plain(plain, overrides or [], name=info["recipe"], base_dir=Path(info["base_dir"]))

    def replace_recipe(self, recipe: Recipe) -> None:
        """Go on with another budget: writes recipe.toml, and keeps the former hash in run.json."""
        former = {"recipe_hash": self.recipe_hash, "until": _now()}
        atomic_write(self.path / "recipe.toml", recipe.to_toml())
        self.update(
            recipe_hash=recipe.hash,
            method=recipe.explain(),
            former_recipes=[*self.info.get("former_recipes", []), former],
        )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory for writing; the system frees it when the process ends, however it ends.

        Raises RunError that names the process which holds it.
        """
        file = (self.path / "lock").open("a+", encoding="utf-8")
        try:
            self._flock(file)
            file.seek(0)
            file.truncate()
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield
        finally:
            file.close()

    def _flock(self, file: Any) -> None:
        for attempt in range(LOCK_TRIES):
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if attempt < LOCK_TRIES - 1:
                    time.sleep(LOCK_PAUSE_SECONDS)
        file.seek(0)
        holder = file.read().strip() or "another process"
        raise RunError(f"{self.path}: is in use by {holder}; wait for it to end, or choose another --out.")

    def is_locked(self) -> bool:
        """Whether a live process writes to this run."""
        file = self.path / "lock"
        if not file.is_file():
            return False
        with file.open("rb") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def update(self, **fields: Any) -> None:
        """Set fields of run.json; a status also sets `started` or `ended`."""
        status = fields.get("status")
        if status is not None:
            if status not in STATUSES:
                raise ValueError(f"status is {status!r}, expected one of {STATUSES}")
            fields |= {"started": _now(), "ended": None} if status == "running" else {"ended": _now()}
        if status == "running":
            fields |= {"hardware": environment.hardware(), "versions": environment.versions()}
        atomic_write(self.path / "run.json", to_json({**self.info, **fields}, indent=2) + "\n")

    def record(self, row: dict[str, Any]) -> None:
        """Add counts of rows and a digest to run.json's `data`, once. Raises RunError for others than the run began with."""
        known = self.info.get("data", [])
        row = json.loads(to_json(row))
        if any(all(row.get(name) == value for name, value in old.items()) for old in known):
            return
        if self.data_are_settled:
            raise RunError(
                f"{self.path}: {row.get('source')} gives other samples than when the run began: the data or what encodes "
                "them has changed. Bring them back, or begin anew with another --out and model.path = a checkpoint."
            )
        self.update(data=[*known, row])

    def log(self, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl; NaN and infinities are written as null."""
        path = self.path / "metrics.jsonl"
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.write(to_json(row) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All rows of metrics.jsonl; a last row that a crash cut short is left out. Raises RunError for one further up."""
        rows = self._metric_rows()
        while rows and not rows[-1]:
            rows.pop()
        if None in rows:
            raise RunError(
                f"{self.path / 'metrics.jsonl'}:{rows.index(None) + 1}: is not a row of metrics, as after a crash while it "
                "was written; remove the line."
            )
        return [row for row in rows if row]

    def _metric_rows(self) -> list[dict[str, Any] | None]:
        """A row a line of metrics.jsonl: empty for an empty line, None for one that can't be read."""
        file = self.path / "metrics.jsonl"
        return [json_row(line) for line in file.read_text("utf-8", "replace").split("\n")] if file.is_file() else []

    def truncate(self, step: int) -> int:
        """Forget metrics and evaluations after `step` (-1: all), before they are made again; the number of unreadable rows."""
        rows = self._metric_rows()
        places = [place for place, row in enumerate(rows) if row and row.get("step", 0) <= step]
        atomic_write(self.path / "metrics.jsonl", "".join(to_json(rows[place]) + "\n" for place in places))
        for later, directory in steps_in(self.path / "evals").items():
            if later > step:
                shutil.rmtree(directory)
        return rows[: max(places, default=0)].count(None)

    def eval_dir(self, step: int) -> Path:
        return self.path / "evals" / f"step_{step:06d}"

    def evals(self) -> dict[int, dict[str, dict[str, float]]]:
        """Scores of the evaluations inside the run: {step: {task: {"mean", "low", "high"}}}."""
        found: dict[int, dict[str, dict[str, float]]] = {}
        for row in self.metrics():
            for key, value in row.items():
                if not key.startswith("eval/"):
                    continue
                name, _, bound = key.removeprefix("eval/").rpartition("/")
                is_bound = bound in ("low", "high") and f"eval/{name}" in row
                task, field = (name, bound) if is_bound else (key.removeprefix("eval/"), "mean")
                found.setdefault(row["step"], {}).setdefault(task, {})[field] = value
        return found

    def checkpoints(self) -> dict[int, Path]:
        """Checkpoint directories by step, in order; whether one is whole, `train.checkpoint.verify` says."""
        return steps_in(self.path / "checkpoints")


def steps_in(directory: Path) -> dict[int, Path]:
    """The sub-directories named `step_<number>`, by number, in order."""
    found = directory.glob("step_*") if directory.is_dir() else ()
    numbered = {int(p.name[5:]): p for p in found if p.is_dir() and p.name[5:].isdigit()}
    return dict(sorted(numbered.items()))


def _first_facts(recipe: Recipe) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "status": "created",
        "recipe": recipe.name,
        "recipe_hash": recipe.hash,
        "base_dir": str(recipe.base_dir.resolve()),
        "method": recipe.explain(),
        "seed": recipe.seed,
        "created": _now(),
        "started": None,
        "ended": None,
        "error": None,
        "command": sys.argv,
        "versions": environment.versions(),
        "hardware": environment.hardware(),
        "data": [],
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
