"""`statewise sample`: rows that the source 'dataset' reads, from a model or from a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.training.conftest import model_dir  # noqa: F401 - a fixture

from statewise import train
from statewise.recipe import Recipe

SMALL = ["source.count=6", "source.group_size=4", "source.max_tokens=60", "batch.rollouts=8", "eval.tasks=[]"]
ANYTHING = 'source.verifier={ kind = "regex", pattern = "(?s)." }'


@pytest.fixture
def words(model_dir: Path) -> list[str]:  # noqa: F811
    return ["rejection", f"model.path={model_dir}", *SMALL, ANYTHING]


def test_a_data_set_that_can_be_trained_on(cli: Callable[..., Any], words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "kept.jsonl"
    done = cli("sample", *words, "--out", out, "--json")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert done.code == 0 and json.loads(done.out) == {"file": str(out), "rows": len(rows)}
    assert done.err.splitlines()[-1].startswith("samples=24/24 ") and "accepted_share=" in done.err
    assert 0 < len(rows) < 24 and all(row["reward"] == 1.0 and row["answer"].isdigit() for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)
    plain = {
        "model": {"path": words[1].partition("=")[2]},
        "source": {"kind": "dataset", "data": str(out)},
        "signal": ["gold"],
        "objective": ["nll"],
        "batch": {"rollouts": 4},
        "budget": {"max_steps": 1},
    }
    run = train(Recipe.from_plain(plain), tmp_path / "run", quiet=True)
    assert run.status == "completed"
    again = cli(
        "sample", *words, f"model.path={run.path}", "--out", tmp_path / "later.jsonl", "--count", "8", "--quiet"
    )
    assert again.code == 0 and again.err == "" and "later.jsonl" in again.out


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (6, 6), (13, 13)])
def test_as_many_rows_as_were_asked_for(
    cli: Callable[..., Any],
    model_dir: Path,  # noqa: F811
    tmp_path: Path,
    count: int,
    rows: int,
) -> None:
    out = tmp_path / "own.jsonl"
    done = cli("sample", "grpo", f"model.path={model_dir}", *SMALL, "--out", out, "--count", count, "--quiet")
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert done.code == 0 and len(found) == rows and len({row["id"] for row in found}) == rows
    assert len({row["id"].rsplit("-", 2)[0] for row in found}) == -(-rows // 4)  # whole groups of as few prompts


def test_bad_input(cli: Callable[..., Any], words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "kept.jsonl"
    assert "samples nothing" in cli("sample", "tiny_psft", "--out", out).err
    assert not out.exists()
    out.write_text("mine")
    done = cli("sample", *words, "--out", out)
    assert done.code == 2 and "exists" in done.err and out.read_text() == "mine"
    assert "unknown option '--cuont'" in cli("sample", *words, "--out", out, "--cuont", "3").err
