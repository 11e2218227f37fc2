"""`statewise sample`: rows that the source 'dataset' reads, from a model or from a run."""

import json
from collections.abc import Callable
from dataclasses import replace
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
    assert done.code == 0 and json.loads(done.out) == {
        **{"file": str(out), "drawn": 24, "rows": len(rows), "empty": 0, "reward": 1.0},
        "prompts": len({row["prompt"][0]["content"] for row in rows}),
    }
    assert done.err.splitlines()[-1].startswith(f"drawn=24/24 rows={len(rows)} ") and "accepted_share=" in done.err
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
    prompts = len({row["id"].rsplit("-", 2)[0] for row in found})
    assert prompts == -(-rows // 4)  # whole groups of as few prompts
    assert f"{rows} rows in {out}: {prompts} prompt" in done.out and f"{4 * prompts} completions drawn" in done.out


def test_rewards_and_empty_completions(
    cli: Callable[..., Any],
    model_dir: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The signal's verifier judges every completion, also of groups that training would leave out; an empty one is told."""
    from statewise.models.generate import InProcessSampler

    original = InProcessSampler.generate

    def generate(self: Any, prompts: Any, sampling: Any, **options: Any) -> Any:
        found = original(self, prompts, sampling, **options)
        return [replace(found[0], tokens=sampling.stop_ids[:1], logprobs=(0.0,)), *found[1:]]

    monkeypatch.setattr(InProcessSampler, "generate", generate)
    digit = 'signal.0.verifier={ kind = "regex", pattern = "[0-4]" }'
    words = ["dapo", f"model.path={model_dir}", *SMALL, digit, "--count", "8", "--json"]
    done = cli("sample", *words, "--out", tmp_path / "own.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    texts = [row["completion"][0]["content"] for row in rows]
    assert [row["reward"] for row in rows] == [float(any(c in "01234" for c in text)) for text in texts]
    found = json.loads(done.out)
    assert (found["drawn"], found["rows"], found["prompts"], found["empty"]) == (8, 8, 2, 1) and texts[0] == ""
    assert (
        found["reward"] == pytest.approx(sum(row["reward"] for row in rows) / 8)
        and f"reward={found['reward']:.4g}" in done.err
    )


def test_rows_that_can_not_be_judged(cli: Callable[..., Any], model_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    """Sampling goes on without rewards, and says what is missing."""
    (tmp_path / "asked.jsonl").write_text('{"prompt": "What is 1 + 1?"}\n')
    words = ["grpo", f"model.path={model_dir}", *SMALL, f"source.data={tmp_path / 'asked.jsonl'}", "source.count=none"]
    done = cli("sample", *words, "--count", "4", "--out", tmp_path / "own.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    assert done.code == 0 and [row["reward"] for row in rows] == [None] * 4 and "no rewards" in done.out
    assert done.err.count("warning: no reward from here on: ") == 1 and "answer" in done.err


def test_nothing_to_write_is_an_error(cli: Callable[..., Any], words: list[str], tmp_path: Path) -> None:
    """Without a file, and with what tells why."""
    never = 'source.verifier={ kind = "regex", pattern = "no such text" }'
    done = cli("sample", *words, never, "--out", tmp_path / "kept.jsonl", "--json")
    assert done.code == 2 and done.out == "" and list(tmp_path.glob("kept*")) == []
    last = done.err.splitlines()[-1]
    assert "of 24 completions none was kept: truncated_share " in last and "accepted_share 0 (mean of 3 steps)" in last


def test_bad_input(cli: Callable[..., Any], words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "kept.jsonl"
    assert "samples nothing" in cli("sample", "tiny_psft", "--out", out).err
    assert not out.exists()
    out.write_text("mine")
    done = cli("sample", *words, "--out", out)
    assert done.code == 2 and "exists" in done.err and out.read_text() == "mine"
    assert "unknown option '--cuont'" in cli("sample", *words, "--out", out, "--cuont", "3").err
