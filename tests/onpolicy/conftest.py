"""Small data in several forms, and their scores under a random model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.training.conftest import model_dir  # noqa: F401 - a fixture

from statewise.onpolicy.scoring import Scores, score
from statewise.tiny import tasks

Rows = list[dict[str, Any]]


@pytest.fixture(scope="session")
def rows() -> Rows:
    """Questions and answers of different lengths, one with markup."""
    made = [
        {"id": row["id"], "prompt": row["prompt"][0]["content"], "completion": row["completion"][0]["content"]}
        for row in tasks.math_problems("train", 40, steps=(1, 2, 3))
    ]
    made[3]["completion"] = "<script>alert('x')</script> é"
    return made


def write(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def scored(tmp_path: Path, model_dir: Path, rows: Rows) -> Callable[..., Scores]:  # noqa: F811
    """Scores of rows or of a file, with settings."""

    def make(data: Any = None, name: str = "scores", **settings: Any) -> Scores:
        if data is None or (isinstance(data, list)):
            data = write(tmp_path / f"{name}.jsonl", rows if data is None else data)
        fields = data if isinstance(data, dict) else {"data": str(data)}
        return score(fields, str(model_dir), out=tmp_path / name, **{"chunk_rows": 8, **settings})

    return make


def column(scores: Scores, name: str) -> list[Any]:
    return [value for batch in scores.batches(name) for value in batch[name]]
