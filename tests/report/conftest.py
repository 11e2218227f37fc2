"""Run directories written by hand: no model, the same bytes each time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'> & <b>bold</b>"
TASKS = {"math": ("target", "exact_match"), "facts": ("retention", "accuracy"), "probe": ("probe", "nats_per_token")}
BASE = {"math": 0.5, "facts": 0.9, "probe": 0.4}
ARMS = {"mild": {"math": 0.8, "facts": 0.88, "probe": 0.41}, "stress": {"math": 0.3, "facts": 0.6, "probe": 0.7}}


def write_evaluation(place: Path, means: Mapping[str, float], n: int, random: Random) -> None:
    """Records whose scores average to about the means."""
    place.mkdir(parents=True)
    told = {}
    for task, mean in means.items():
        purpose, metric = TASKS[task]
        continuous = purpose == "probe"
        scores = [
            round(mean + random.uniform(-0.1, 0.1), 4) if continuous else float(random.random() < mean)
            for _ in range(n)
        ]
        rows = [_record(task, index, score) for index, score in enumerate(scores)]
        (place / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        told[task] = {
            "name": task,
            "metric": metric,
            "n": n,
            "mean": sum(scores) / n,
            "se": 0.01,
            "low": sum(scores) / n - 0.02,
            "high": sum(scores) / n + 0.02,
            "higher_is_better": not continuous,
            "extra": {},
            "purpose": purpose,
        }
    (place / "summary.json").write_text(json.dumps({"tasks": told}))


def _record(task: str, index: int, score: float) -> dict[str, Any]:
    record: dict[str, Any] = {"id": f"q{index}", "score": score}
    if task == "math":
        text = HOSTILE if index == 0 else f"answer {score:.0f} to {index}"
        record |= {"prompt": [{"role": "user", "content": f"question {index}"}], "reference": "1", "response": text}
    return record


def write_run(path: Path, arm: str, seed: int, means: Mapping[str, float], *, n: int = 40, steps: int = 5) -> Path:
    """A completed run with metrics and evaluations of step 0 and its last step."""
    path.mkdir(parents=True)
    write_evaluation(path / "evals" / "step_000000", BASE, n, Random(0))
    write_evaluation(path / "evals" / f"step_{steps:06d}", means, n, Random(f"{arm} {seed}"))
    info = {
        "schema": 1,
        "status": "completed",
        "recipe": arm,
        "recipe_hash": f"{arm}{seed}",
        "seed": seed,
        "error": None,
        "started": "2026-01-01T00:00:00+00:00",
        "ended": "2026-01-01T00:01:00+00:00",
        "method": [f"states:    {arm}", f"budget:    max_steps = {steps}; seed {seed}"],
        "versions": {"statewise": "0.1.0"},
        "hardware": {"cores": 2},
        "data": [],
        "spent": {"step": steps, "tokens": 100 * steps, "rollouts": 8, "seconds": 30.0, "flops": 1e9},
    }
    (path / "run.json").write_text(json.dumps(info))
    (path / "recipe.toml").write_text(f'seed = {seed}\nsource = "{arm}"\n[optim]\nlr = 0.001\n')
    rows = [
        {"step": step, "loss": round(1 / step, 4), "phi": -0.1, "total_tokens": 100 * step, "step_seconds": 0.5}
        for step in range(1, steps + 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two arms of two seeds."""
    return [write_run(tmp_path / f"{arm}{seed}", arm, seed, means) for arm, means in ARMS.items() for seed in (0, 1)]


def edit(run: Path, **fields: Any) -> None:
    """Change fields of a run's facts."""
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**info, **fields}))


Runs = Sequence[Path]
