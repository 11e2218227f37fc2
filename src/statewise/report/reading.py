"""What a report needs from run directories, read once: facts, recipe, metrics, scores, tables of diagnostics."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from statewise.errors import RunError
from statewise.evals.from_runs import evaluated_steps, is_evaluation, last_results, read_base
from statewise.evals.results import TaskResult, read_results
from statewise.report.names import shortest_names
from statewise.run import RunDir

Results = Mapping[str, TaskResult]
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class RunView:
    """One run, or a directory of `eval --out` (then without info, recipe and metrics).

    scores: of its last evaluation after step 0; base: of the untrained model it is compared with. evaluation: which one
    the scores are of, where there is a choice.
    """

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
    evaluation: str = ""

    @property
    def is_run(self) -> bool:
        """Whether it was trained here, and not evaluated alone."""
        return bool(self.info)

    @property
    def name(self) -> str:
        return f"{self.arm}, seed {self.seed}" if self.is_run else self.arm


@dataclass(frozen=True)
class Planned:
    """A run that a study planned and that has not begun."""

    arm: str
    seed: int


def read_view(path: str | Path) -> RunView:
    """A run, or a directory of `eval --out`. Raises RunError."""
    return _read_evaluation(Path(path)) if is_evaluation(Path(path)) else read_run(path)


def _read_evaluation(path: Path) -> RunView:
    return RunView(path, path.name, 0, "completed", {}, {}, scores=last_results(path), evaluation=str(path))


def read_run(path: str | Path, arm: str | None = None, base: str | Path | None = None) -> RunView:
    """A run as it is now; `base`: a run whose first evaluation is the base, in place of its own. Raises RunError."""
    run = RunDir.open(path)
    try:
        recipe = tomllib.loads((run.path / "recipe.toml").read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{run.path}/recipe.toml: is not valid TOML: {error}") from None
    info = run.info
    found = evaluated_steps(run.path)
    steps = [step for step in found if step > 0] if run.status == "completed" else []
    before = found if base is None else evaluated_steps(Path(base)) if (Path(base) / "run.json").is_file() else {}
    return RunView(
        run.path,
        arm or str(info.get("recipe")),
        int(info.get("seed") or 0),
        run.status,
        info,
        recipe,
        run.metrics(),
        last_results(run.path) if steps else None,
        read_results(before[0]) if 0 in before else None,
        _diagnostics(run.path / "diagnostics"),
        f"step {steps[-1]} (not {', '.join(map(str, steps[:-1]))})" if len(steps) > 1 else "",
    )


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
    """Runs that differ in their seed alone share an arm; in the order given. Raises RunError where `base` is none.

    An arm is called as its recipe, and where several share that, as its (first) directory. A run without an evaluation of
    step 0 takes that of another run of the same model, where there is one.
    """
    views = [read_view(run) for run in runs]
    if base is not None:
        given = read_base(base)
        views = [replace(view, base=given) for view in views]
    firsts: dict[str, RunView] = {}
    for view in views:
        firsts.setdefault(_key(view), view)
    names = shortest_names([(view.arm if view.is_run else None, view.path) for view in firsts.values()])
    labels = dict(zip(firsts, names, strict=True))
    views = [replace(view, arm=labels[_key(view)]) for view in views]
    bases = {_model_of(view.recipe): view.base for view in views[::-1] if view.is_run and view.base is not None}
    alone = [view.is_run and view.base is None for view in views]
    return [
        replace(view, base=bases.get(_model_of(view.recipe))) if is_alone else view
        for view, is_alone in zip(views, alone, strict=True)
    ]


def _key(view: RunView) -> str:
    """The same for runs that differ in their seed alone."""
    if not view.is_run:
        return str(view.path.resolve())
    return json.dumps({key: value for key, value in view.recipe.items() if key != "seed"}, sort_keys=True)


def _model_of(recipe: Mapping[str, Any]) -> str:
    return str(recipe.get("model", {}).get("path", "tiny"))
