"""Studies of a random model of 40,000 parameters, and study directories written by hand."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.training.conftest import model_dir as model_dir

STUDY = """
base = "base.toml"
target = "tiny:math"
versus = "stress"
seeds = [0, 1]
tasks = [{ kind = "tiny:math", limit = 4 }, { kind = "tiny:facts", limit = 8 }]
budget = { max_steps = 3 }

[arms.mild]

[arms.student]
set = ['signal=[{kind="teacher",teacher="arm:stress"}]', 'objective=["kl_teacher_student"]']

[arms.stress]
set = ["optim.lr=1e-2"]
"""
RECIPE = """
model = { path = "MODEL" }
source = { kind = "dataset", data = "tiny:math", count = 12 }
signal = ["gold"]
objective = ["nll"]
batch = { rollouts = 4 }
budget = { max_steps = 1 }
checkpoint = { every = 1 }
"""


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    (tmp_path / "base.toml").write_text(RECIPE)
    (tmp_path / "small.toml").write_text(STUDY)
    return tmp_path / "small.toml"


@pytest.fixture
def runnable(study_file: Path, model_dir: Path) -> Path:
    """The study with a model, one seed and its teacher."""
    base = study_file.with_name("base.toml")
    base.write_text(base.read_text().replace("MODEL", str(model_dir)))
    study_file.write_text(study_file.read_text().replace("[0, 1]", "[0]"))
    return study_file


def write_scores(path: Path, **tasks: Sequence[float]) -> None:
    """An evaluation's directory, with a record for every score."""
    path.mkdir(parents=True)
    told = {}
    for name, scores in tasks.items():
        rows = [{"id": f"q{i}", "score": score, "completion": f"text {i}"} for i, score in enumerate(scores)]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        numbers = {"n": len(scores), "se": 0.0, "low": 0.0, "high": 1.0}
        told[name] = {
            **numbers,
            "name": name,
            "mean": sum(scores) / len(scores),
            "metric": "exact",
            "higher_is_better": True,
        }
    (path / "summary.json").write_text(json.dumps({"tasks": told}))


WriteRun = Callable[..., dict[str, Any]]


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Writes a completed run of an arm with its scores; returns its row of the plan."""

    def write(arm: str, seed: int, status: str = "completed", **tasks: Sequence[float]) -> dict[str, Any]:
        name = f"runs/{arm}-seed{seed}"
        path = tmp_path / "study" / name
        path.mkdir(parents=True)
        info = {
            "schema": 1,
            "status": status,
            "error": None if status == "completed" else "boom",
            "spent": {"tokens": 90},
        }
        (path / "run.json").write_text(json.dumps(info))
        (path / "recipe.toml").write_text("")
        rows = [{"step": step, "loss": 1.0 / step, "step_seconds": 0.5} for step in (1, 2)]
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if tasks:
            write_scores(path / "evals" / "step_000002", **tasks)
        return {"arm": arm, "seed": seed, "run": name, "base": "base/base-b", "own_budget": False}

    return write


def write_plan(out: Path, rows: list[dict[str, Any]], **fields: Any) -> None:
    (out / "plan.json").write_text(json.dumps({"name": "s", "target": "math", "runs": rows, **fields}))
