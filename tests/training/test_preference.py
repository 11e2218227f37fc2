"""Preference recipes in the loop: they learn, and any split, packing, number of processes or interruption is the same."""

import signal
from pathlib import Path
from typing import Any

import pytest
from tests.training.conftest import losses_of, weights_of
from tests.training.test_distributed import run_on, same
from tests.training.test_loop import _killed, run_in_child

from statewise import train
from statewise.recipe import Recipe
from statewise.run import RunDir

STEPS = 6


@pytest.fixture
def plain(model_dir: Path) -> dict[str, Any]:
    """DPO on 12 pairs, 4 pairs a step."""
    return {
        "model": {"path": str(model_dir)},
        "source": {"kind": "pairs", "data": "tiny:math_pairs", "count": 12},
        "signal": ["preference", "reference"],
        "objective": [{"loss": {"kind": "dpo", "beta": 0.5}, "reduce": "group_mean"}],
        "batch": {"rollouts": 8, "micro_rows": 4},
        "optim": {"lr": 1e-2, "schedule": "cosine", "warmup": 0.2},
        "checkpoint": {"every": 2},
        "budget": {"max_steps": STEPS},
    }


def trained(plain: dict[str, Any], path: Path) -> RunDir:
    return train(Recipe.from_plain(plain, name="small"), path, quiet=True)


def rows_of(run: RunDir) -> list[dict[str, Any]]:
    return [row for row in run.metrics() if "loss" in row]


LOSSES = {"dpo": {"beta": 0.5}, "ipo": {"beta": 0.5}, "simpo": {}}


@pytest.mark.parametrize("kind", LOSSES)
def test_margins_grow(kind: str, plain: dict[str, Any], tmp_path: Path):
    plain["objective"] = [{"loss": {"kind": kind, **LOSSES[kind]}, "reduce": "group_mean"}]
    plain["signal"] = plain["signal"][: 1 if kind == "simpo" else 2]
    plain["batch"] = {"rollouts": 24}
    rows = rows_of(trained(plain, tmp_path / "run"))
    first, last = rows[0], rows[-1]
    assert last["loss"] < first["loss"] and last["margin"] > first["margin"]
    assert first["num_pairs"] == 12 and first["num_tied_groups"] == 0
    assert 0.5 < last["accuracy"] <= 1.0 and last["group_loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert last["chosen_logprobs"] < 0 and last["rejected_logprobs"] < 0
    if kind != "simpo":
        assert first["margin"] == pytest.approx(0.0, abs=1e-5), "at step 0 the policy is the reference"


@pytest.mark.parametrize("shipped", ["dpo", "ipo", "simpo"])
def test_shipped_recipes_run(shipped: str, model_dir: Path, tmp_path: Path):
    changes = [f"model.path={model_dir}", "budget={max_steps=2}", "eval.tasks=[]", "source.count=16"]
    run = train(Recipe.load(shipped, changes), tmp_path / "run", quiet=True)
    assert [row["num_pairs"] for row in rows_of(run)] == [16, 16]


BATCHES = [{"rollouts": 8}, {"rollouts": 8, "micro_rows": 1}, {"rollouts": 8, "pack": 256, "micro_tokens": 256}]


@pytest.mark.parametrize("batch", BATCHES)
def test_any_split_gives_the_same_losses(batch: dict[str, Any], plain: dict[str, Any], tmp_path: Path):
    whole = trained(plain, tmp_path / "whole")
    run = trained({**plain, "batch": batch}, tmp_path / "run")
    assert losses_of(run) == pytest.approx(losses_of(whole), abs=2e-5)
    for name in ("margin", "accuracy", "chosen_logprobs"):
        a, b = ([row[name] for row in rows_of(r)] for r in (run, whole))
        assert a == pytest.approx(b, abs=2e-3), name


def test_killed_and_resumed_ends_with_the_same_bytes(plain: dict[str, Any], tmp_path: Path):
    recipe = Recipe.from_plain(plain, name="small")
    whole, cut = trained(plain, tmp_path / "whole"), tmp_path / "cut"
    assert run_in_child(_killed(recipe, cut, "statewise.training.loop.take_step", 4)) == -signal.SIGKILL
    train(recipe, cut, resume=True, quiet=True)
    assert weights_of(cut, STEPS) == weights_of(whole.path, STEPS)
    assert losses_of(RunDir.open(cut)) == losses_of(whole)


RANKS: dict[str, dict[str, Any]] = {
    "dpo": {},
    "three pairs, so that the ranks differ": {"batch": {"rollouts": 6}},
    "one pair, so that a rank has none": {"batch": {"rollouts": 2}},
    "packed lora": {"batch": {"rollouts": 8, "pack": 256}, "model": {"adapter": {"rank": 4}}},
    "two updates a step": {"batch": {"rollouts": 8, "minibatches": 2}},
}


@pytest.mark.parametrize("name", RANKS)
def test_two_processes_equal_one(name: str, plain: dict[str, Any], tmp_path: Path):
    changes = RANKS[name]
    plain = {**plain, **changes, "model": {**plain["model"], **changes.get("model", {})}}
    one, two = run_on(1, plain, tmp_path / "one"), run_on(2, plain, tmp_path / "two")
    same(one, two)
    for column in ("margin", "accuracy"):
        assert [r[column] for r in rows_of(two)] == pytest.approx([r[column] for r in rows_of(one)], abs=1e-4)
