"""The table against numbers worked out by hand."""

import json
from pathlib import Path

import pytest
from tests.study.conftest import WriteRun, write_plan, write_scores

from statewise.errors import DataError, RunError
from statewise.study.results import read_study
from statewise.study.table import status, table


def make(out: Path, write_run: WriteRun) -> None:
    """Base: math 2/4, facts 4/4. Mild gains 1/4 in one seed of two; stress loses facts."""
    rows = [
        write_run("mild", 0, math=[1, 1, 1, 0], facts=[1, 1, 1, 1]),
        write_run("mild", 1, math=[1, 1, 0, 0], facts=[1, 1, 1, 0]),
        write_run("stress", 0, math=[1, 0, 0, 0], facts=[1, 1, 0, 0]),
        write_run("stress", 1, math=[0, 0, 0, 0], facts=[1, 0, 0, 0]),
        write_run("broken", 0, status="failed"),
    ]
    write_scores(out / "base" / "base-b" / "evals" / "step_000000", math=[1, 1, 0, 0], facts=[1, 1, 1, 1])
    write_plan(out, rows, versus="stress")


def test_table(tmp_path: Path, write_run: WriteRun) -> None:
    make(tmp_path / "study", write_run)
    base, mild, stress, broken = table(read_study(tmp_path / "study"))
    assert base["scores"] == {"math": 0.5, "facts": 1.0}
    assert mild["scores"] == {"math": 0.625, "facts": 0.875}
    assert mild["gain"]["value"] == pytest.approx(0.125)
    assert mild["gain"]["low"] <= 0.125 <= mild["gain"]["high"]
    assert mild["forgetting"]["facts"]["value"] == pytest.approx(0.125)
    assert mild["mean_forgetting"]["value"] == pytest.approx(0.125)
    assert mild["retention"]["value"] == pytest.approx(0.875)
    assert mild["versus"]["value"] == pytest.approx(0.625 - 0.125)
    assert stress["forgetting"]["facts"]["value"] == pytest.approx(1 - 0.375)
    assert "versus" not in stress
    assert mild["trained_tokens"] == 90 and mild["seconds"] == 1.0
    assert (broken["seeds"], broken["planned"], broken["status"]) == (0, 1, "failed")


def test_status_tells_what_keeps_a_run_waiting(tmp_path: Path, write_run: WriteRun) -> None:
    out = tmp_path / "study"
    own = {"seed": 0, "own_budget": False, "base": "base/base-b"}
    taught = {**own, "arm": "student", "run": "runs/student-seed0", "needs": ["teacher-seed0"]}
    teacher = {**own, "arm": "teacher", "run": "runs/teacher-seed0", "needs": []}
    base = out / "base" / "base-b"
    base.mkdir(parents=True)
    (base / "recipe.toml").write_text("")

    def errors() -> list[str | None]:
        return [row["error"] for row in status(read_study(out))]

    write_plan(out, [teacher, taught])
    assert errors() == [None, None]
    (base / "run.json").write_text(json.dumps({"schema": 1, "status": "failed", "error": "OSError: full\nmore"}))
    assert errors() == ["waits for base-b, which failed: OSError: full"] * 2
    (base / "run.json").write_text(json.dumps({"schema": 1, "status": "completed", "error": None}))
    failed = {"teacher-seed0": "DataError: empty\nmore", "student-seed0": "needs teacher-seed0, which failed"}
    (out / "study.jsonl").write_text(json.dumps({"failed": {}}) + "\n" + json.dumps({"failed": failed}) + "\n")
    assert errors() == ["DataError: empty", "waits for teacher-seed0, which failed: DataError: empty"]
    write_plan(out, [write_run("teacher", 0, status="failed"), {**taught, "needs": ["teacher-seed0"]}])
    assert errors() == ["boom", "waits for teacher-seed0, which failed: boom"]


def test_status_tells_of_failures(tmp_path: Path, write_run: WriteRun) -> None:
    make(tmp_path / "study", write_run)
    rows = status(read_study(tmp_path / "study"))
    assert [row["status"] for row in rows] == ["completed"] * 4 + ["failed"]
    assert rows[-1]["error"] == "boom" and rows[0]["error"] is None
    assert rows[0]["step"] == 2


def test_other_examples_are_not_compared(tmp_path: Path, write_run: WriteRun) -> None:
    out = tmp_path / "study"
    row = write_run("mild", 0, math=[1, 1, 1], facts=[1])
    write_scores(out / "base" / "base-b" / "evals" / "step_000000", math=[1, 1], facts=[1])
    write_plan(out, [row])
    with pytest.raises(DataError, match="no partner"):
        table(read_study(out))


def test_no_study_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="study run"):
        read_study(tmp_path)
