"""What a study has found so far: how far its runs are, and a ledger of each arm. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from statewise.errors import RunError
from statewise.evals.ledger import Ledger, Results, make_ledger
from statewise.files import json_row
from statewise.run import RunDir, steps_in


@dataclass(frozen=True)
class StudyRun:
    """A planned run and how far it is; `base`: the run of the untrained model that it is compared with."""

    arm: str
    seed: int
    path: Path
    base: Path
    plan: Mapping[str, Any]
    status: str
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def error(self) -> str | None:
        return self.info.get("error") if self.status != "completed" else None

    @cached_property
    def scores(self) -> Results | None:
        """Results of the last evaluation; None before the run has ended."""
        return last_scores(self.path) if self.status == "completed" else None

    @cached_property
    def base_scores(self) -> Results | None:
        return last_scores(self.base)


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
        """The completed runs of an arm whose base is known."""
        return [run for run in self.runs if run.arm == arm and run.scores and run.base_scores]

    @property
    def purposes(self) -> dict[str, str]:
        """What the study says that its tasks are for; a task that it doesn't name keeps its own purpose.

        Where it names the retention tasks, the others are probes.
        """
        told = {self.plan["target"]: "target"}
        kept = self.plan.get("retention")
        first = next((run.scores for run in self.runs if run.scores), {})
        for name, result in first.items():
            if name not in told:
                own = "retention" if result.purpose == "target" else result.purpose
                told[name] = own if kept is None else "retention" if name in kept else "probe"
        return told

    def ledger(self, arm: str) -> Ledger | None:
        """The arm against the untrained model over its seeds; None before there is something to compare."""
        pairs = [(run.base_scores, run.scores) for run in self.of(arm)]
        return make_ledger(arm, pairs, self.purposes) if pairs else None  # type: ignore[arg-type]

    def against(self, arm: str, other: str) -> Ledger | None:
        """The arm against another over their shared seeds, the other in the place of the base."""
        others = {run.seed: run.scores for run in self.of(other)}
        pairs = [(others[run.seed], run.scores) for run in self.of(arm) if run.seed in others]
        return make_ledger(arm, pairs, self.purposes) if pairs else None  # type: ignore[arg-type]


def last_scores(path: Path) -> Results | None:
    """Results of the last evaluation inside a run, None where there is none."""
    from statewise.evals.results import read_results

    found = {step: place for step, place in steps_in(path / "evals").items() if (place / "summary.json").is_file()}
    return read_results(found[max(found)]) if found else None


def read_study(path: str | Path) -> StudyResults:
    """A study from its directory, or from its TOML file with the directory beside it. Raises RunError where there is none."""
    out = Path(path)
    if out.suffix == ".toml":
        out = out.with_suffix("")
    file = out / "plan.json"
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(
            f"{out}: is no study directory (plan.json: {error.strerror}); run `statewise study run FILE.toml` first."
        ) from None
    except ValueError as error:
        raise RunError(f"{file}: can't be read: {error}; `statewise study run` writes it anew.") from None
    return StudyResults(out, plan, tuple(_read_run(out, row) for row in plan["runs"]))


def _read_run(out: Path, row: Mapping[str, Any]) -> StudyRun:
    path, base = out / row["run"], out / row["base"]
    if not (path / "run.json").is_file():
        return StudyRun(row["arm"], row["seed"], path, base, row, "waiting")
    run = RunDir.open(path)
    return StudyRun(row["arm"], row["seed"], path, base, row, run.status, run.info)


def why_waiting(study: StudyResults, run: StudyRun) -> str | None:
    """What keeps a run that has not begun: the base or teacher that failed, or its own failure before it began."""
    told = _told_failures(study.path)
    rows = {Path(row["run"]).name: row for row in study.plan["runs"]}
    for need in _needed(rows, run.path.name):
        error = _failure(study.path / need, told)
        if error is not None:
            return f"waits for {Path(need).name}, which failed: {error}"
    return told.get(run.path.name)


def _needed(rows: Mapping[str, Mapping[str, Any]], key: str) -> Iterator[str]:
    """Directories of all that a run needs, those that the others need first."""
    row = rows[key]
    yield row["base"]
    for need in row.get("needs", ()):
        yield from _needed(rows, need)
        yield rows[need]["run"]


def _failure(path: Path, told: Mapping[str, str]) -> str | None:
    """The first line of a failed piece's error; None for one that didn't fail."""
    status = RunDir.open(path).status if (path / "run.json").is_file() else "waiting"
    if status in ("completed", "running"):
        return None
    error = RunDir.open(path).info.get("error") if status == "failed" else told.get(path.name)
    return str(error or "no error was kept").partition("\n")[0] if error or status == "failed" else None


def _told_failures(out: Path) -> dict[str, str]:
    """{piece: error's first line} of what failed when the study last ran."""
    file = out / "study.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    last = json_row(lines[-1]) if lines else None
    return {key: str(error).partition("\n")[0] for key, error in ((last or {}).get("failed") or {}).items()}


def progress(run: StudyRun) -> dict[str, Any]:
    """Step, loss and seconds of a run's last row."""
    if run.status == "waiting":
        return {}
    rows = [row for row in RunDir(run.path).metrics() if "step_seconds" in row]
    last = rows[-1] if rows else {}
    return {"step": last.get("step", 0), "loss": last.get("loss"), "seconds": sum(row["step_seconds"] for row in rows)}
