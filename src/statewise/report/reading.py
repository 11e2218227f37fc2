"""What a report needs from run directories, read once: facts, recipe, metrics, scores, tables of diagnostics."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from statewise.errors import RunError
from statewise.evals.results import TaskResult, read_results
from statewise.run import RunDir, steps_in

Results = Mapping[str, TaskResult]
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class RunView:
    """One run. `scores`: of its last evaluation after step 0; `base`: of the untrained model it is compared with."""

    path: Path
    arm: str
    seed: int
    status: str
    info: Mapping[str, Any]
    recipe: Mapping[str, Any]
    metrics: Rows = field(default_factory=list)
    scores: Results | None = None
    base: Results | None = None
    diagnostics: Mapping[str, Rows] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.arm}, seed {self.seed}"


@dataclass(frozen=True)
class Planned:
    """A run that a study planned and that has not begun."""

    arm: str
    seed: int


def read_run(path: str | Path, arm: str | None = None, base: str | Path | None = None) -> RunView:
    """A run as it is now; `base`: a run whose first evaluation is the base, in place of its own. Raises RunError."""
    run = RunDir.open(path)
    try:
        recipe = tomllib.loads((run.path / "recipe.toml").read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{run.path}/recipe.toml: is not valid TOML: {error}") from None
    info = run.info
    found = _evaluations(run.path)
    after = {step: place for step, place in found.items() if step > 0}
    before = found if base is None else _evaluations(Path(base))
    return RunView(
        run.path,
        arm or str(info.get("recipe")),
        int(info.get("seed") or 0),
        run.status,
        info,
        recipe,
        run.metrics(),
        read_results(after[max(after)]) if after and run.status == "completed" else None,
        read_results(before[0]) if 0 in before else None,
        _diagnostics(run.path / "diagnostics"),
    )


def _evaluations(path: Path) -> dict[int, Path]:
    return {step: place for step, place in steps_in(path / "evals").items() if (place / "summary.json").is_file()}


def _diagnostics(directory: Path) -> dict[str, Rows]:
    """{name: rows} of every `*.jsonl`, and of every `*.json` that is a list of rows or holds one under "rows"."""
    found: dict[str, Rows] = {}
    for file in sorted([*directory.glob("*.json"), *directory.glob("*.jsonl")]):
        text = file.read_text(encoding="utf-8", errors="replace")
        try:
            lines = text.split("\n") if file.suffix == ".jsonl" else None
            content = json.loads(text) if lines is None else [json.loads(line) for line in lines if line]
        except ValueError as error:
            raise RunError(f"{file}: can't be read as a table: {error}") from None
        rows = content.get("rows", [content]) if isinstance(content, dict) else content
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            found[file.stem] = rows
    return found


def grouped(runs: Sequence[str | Path], base: str | Path | None = None) -> list[RunView]:
    """Runs that differ in their seed alone share an arm, called as their recipe; in the order given.

    A run without an evaluation of step 0 takes that of another run of the same model, where there is one.
    """
    from dataclasses import replace

    views = [read_run(run, base=base) for run in runs]
    labels: dict[str, str] = {}
    for view in views:
        key = _but_seed(view.recipe)
        if key not in labels:
            taken = view.arm in labels.values()
            labels[key] = f"{view.arm} ({view.path.name})" if taken else view.arm
    views = [replace(view, arm=labels[_but_seed(view.recipe)]) for view in views]
    bases = {_model_of(view.recipe): view.base for view in views[::-1] if view.base is not None}
    return [view if view.base is not None else replace(view, base=bases.get(_model_of(view.recipe))) for view in views]


def _but_seed(recipe: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in recipe.items() if key != "seed"}, sort_keys=True)


def _model_of(recipe: Mapping[str, Any]) -> str:
    return str(recipe.get("model", {}).get("path", "tiny"))
