"""What a study has found so far: states of its runs, and a table of arms with paired intervals. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from statewise.errors import RunError
from statewise.run import RunDir

Records = Mapping[str, Mapping[str, Any]]  # by example id


@dataclass(frozen=True)
class Scores:
    """One evaluation: {task: its summary} and, read when asked for, {task: {example: record}}."""

    path: Path

    @cached_property
    def tasks(self) -> dict[str, dict[str, Any]]:
        file = self.path / "summary.json"
        try:
            found: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["tasks"]
        except (OSError, ValueError, KeyError) as error:
            raise RunError(f"{file}: can't be read as an evaluation: {error!r}") from None
        return found

    def records(self, task: str) -> Records:
        from statewise.evals.results import file_name

        file = self.path / f"{file_name(task)}.jsonl"
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
        return {row["id"]: row for row in rows}


@dataclass(frozen=True)
class StudyRun:
    """A planned run and how far it is; `scores` of its last step and `base` of the untrained model where they exist."""

    arm: str
    seed: int
    path: Path
    plan: Mapping[str, Any]
    status: str
    info: Mapping[str, Any] = field(default_factory=dict)
    scores: Scores | None = None
    base: Scores | None = None

    @property
    def error(self) -> str | None:
        return self.info.get("error") if self.status != "completed" else None


@dataclass(frozen=True)
class StudyResults:
    """A study's directory as it is now."""

    path: Path
    plan: Mapping[str, Any]
    runs: tuple[StudyRun, ...]

    @property
    def arms(self) -> list[str]:
        """In the order of the study."""
        return list(dict.fromkeys(run.arm for run in self.runs))

    def of(self, arm: str) -> list[StudyRun]:
        """The completed runs of an arm."""
        return [run for run in self.runs if run.arm == arm and run.status == "completed" and run.scores is not None]

    @property
    def tasks(self) -> list[str]:
        first = next((run.scores for run in self.runs if run.scores is not None), None)
        return list(first.tasks) if first is not None else []

    @property
    def retention(self) -> list[str]:
        """The tasks to keep: those that the study names, else all but the target where higher is better."""
        if self.plan.get("retention") is not None:
            return list(self.plan["retention"])
        told = next((run.scores.tasks for run in self.runs if run.scores is not None), {})
        return [
            name for name, task in told.items() if name != self.plan["target"] and task.get("higher_is_better", True)
        ]


def read_study(path: str | Path) -> StudyResults:
    """A study from its directory, or from its TOML file with the directory beside it. Raises RunError where there is none."""
    out = Path(path)
    if out.suffix == ".toml":
        out = out.with_suffix("")
    file = out / "plan.json"
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{out}: is no study directory ({error}); run `statewise study run FILE.toml` first.") from None
    return StudyResults(out, plan, tuple(_read_run(out, row) for row in plan["runs"]))


def _read_run(out: Path, row: Mapping[str, Any]) -> StudyRun:
    path = out / row["run"]
    base = Scores(out / row["base"]) if (out / row["base"] / "summary.json").is_file() else None
    if not (path / "run.json").is_file():
        return StudyRun(row["arm"], row["seed"], path, row, "waiting", base=base)
    run = RunDir.open(path)
    evals = sorted((path / "evals").glob("step_*/summary.json"))
    scores = Scores(evals[-1].parent) if evals else None
    return StudyRun(row["arm"], row["seed"], path, row, run.status, run.info, scores, base)


def progress(run: StudyRun) -> dict[str, Any]:
    """Step, loss and seconds of a run's last row."""
    if run.status == "waiting":
        return {}
    rows = [row for row in RunDir(run.path).metrics() if "step_seconds" in row]
    last = rows[-1] if rows else {}
    return {"step": last.get("step", 0), "loss": last.get("loss"), "seconds": sum(row["step_seconds"] for row in rows)}


@dataclass(frozen=True)
class Paired:
    """A difference with its 95 % interval: examples paired, averaged over seeds."""

    value: float
    low: float
    high: float


def difference(pairs: Sequence[tuple[Scores, Scores]], task: str) -> Paired:
    """Mean over seeds of (first - second) on `task`. Raises RunError where the examples differ."""
    from statewise.stats.bootstrap import bootstrap_mean

    gaps: dict[str, list[float]] = {}
    for first, second in pairs:
        one, two = first.records(task), second.records(task)
        if one.keys() != two.keys():
            raise RunError(f"{first.path} and {second.path}: task '{task}' has other examples; evaluate both anew.")
        for name, record in one.items():
            gaps.setdefault(name, []).append(float(record["score"]) - float(two[name]["score"]))
    means = [sum(values) / len(values) for values in gaps.values()]
    low, high = bootstrap_mean(means, resamples=2000)
    return Paired(sum(means) / len(means), low, high)
