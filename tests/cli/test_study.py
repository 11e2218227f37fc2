"""`statewise study`, `report` and `compare` on the command line; nothing is trained here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.report.conftest import ARMS, write_run
from tests.study.conftest import study_file as study_file

from statewise.cli.study_progress import last_row, where

Cli = Callable[..., Any]


@pytest.fixture
def done(tmp_path: Path) -> Path:
    """A study whose runs are there: two arms, two seeds, one of them failed."""
    out = tmp_path / "study"
    rows = []
    for arm, means in ARMS.items():
        for seed in (0, 1):
            write_run(out / "runs" / f"{arm}-seed{seed}", arm, seed, means)
            own = {
                "run": f"runs/{arm}-seed{seed}",
                "base": "base/base-x",
                "own_budget": False,
                "budget": {"max_steps": 5},
            }
            rows.append({"arm": arm, "seed": seed, **own})
    write_run(out / "base" / "base-x", "base", 0, ARMS["mild"])
    info = json.loads((out / "runs/stress-seed1/run.json").read_text())
    (out / "runs/stress-seed1/run.json").write_text(json.dumps({**info, "status": "failed", "error": "boom"}))
    plan = {"schema": 1, "name": "study", "about": "Why?", "target": "math", "versus": "stress", "runs": rows}
    (out / "plan.json").write_text(json.dumps(plan))
    return out


def test_plan(cli: Cli, study_file: Path) -> None:
    result = cli("study", "plan", study_file)
    assert result.code == 0
    assert "6 run(s), 3 arm(s)" in result.out and "budget of an arm: max_steps = 3" in result.out
    assert "stress-seed1" in result.out
    plain = json.loads(cli("study", "plan", study_file, "--json").out)
    assert [run["arm"] for run in plain["runs"]] == ["mild", "mild", "stress", "stress", "student", "student"]
    assert not study_file.with_suffix("").exists()


def test_status_and_table(cli: Cli, done: Path) -> None:
    status = cli("study", "status", done)
    assert "failed" in status.out and "boom" in status.out
    assert f"statewise study run FILE.toml --out {done}`" in status.err
    done.with_suffix(".toml").touch()
    assert f"statewise study run {done}.toml`" in cli("study", "status", done).err
    table = cli("study", "table", done).out.splitlines()
    assert table[0].split()[:4] == ["arm", "seeds", "math", "gain"]
    assert any(line.startswith("stress  1/2") for line in table)
    rows = json.loads(cli("study", "table", done, "--json").out)["rows"]
    assert [row["arm"] for row in rows] == ["base", "mild", "stress"]
    assert rows[1]["versus"]["arm"] == "stress"


def test_report_of_a_study_names_what_failed(cli: Cli, done: Path) -> None:
    assert cli("study", "report", done).out.strip() == str(done / "report.html")
    page = (done / "report.html").read_text()
    assert "stress, seed 1: failed: boom" in page and "Why?" in page
    assert cli("report", done, "--out", done / "again.html").code == 0
    assert cli("report", done, "--out", done).out.strip() == str(done / "report.html")  # into a directory
    assert (done / "again.html").read_text() == page


def test_compare_and_report_of_runs(cli: Cli, done: Path, tmp_path: Path) -> None:
    runs = [done / "runs" / f"{arm}-seed0" for arm in ARMS]
    result = cli("compare", *runs, "--html", tmp_path / "c.html")
    assert result.code == 0 and (tmp_path / "c.html").is_file()
    assert "stress" in result.out and "worse" in result.out and "source" in result.out
    plain = json.loads(cli("report", *runs, "--vs", "stress", "--json").out)
    assert plain["versus"] == "stress"
    assert cli("compare", runs[0]).code == 2
    assert "no run or arm 'x'" in cli("report", *runs, "--vs", "x").err


def test_what_is_no_study_is_said(cli: Cli, tmp_path: Path) -> None:
    result = cli("study", "table", tmp_path)
    assert result.code == 2 and "is no study directory" in result.err


def test_the_last_whole_row_tells_where_a_run_is(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert last_row(file) == {}
    file.write_text('{"step": 1}\n{"step": 2, "loss": 0.25}\n{"step": 3, "lo')
    assert last_row(file) == {"step": 2, "loss": 0.25}
    assert where(tmp_path, "mild-seed0-abc") == "mild-seed0 step 2 loss 0.25"
