"""Tokens and operations that a run uses, against counts by hand."""

from pathlib import Path
from typing import Any

import pytest

from statewise.recipe import Recipe
from statewise.run import RunDir
from statewise.training.loop import train

# 320 tokens of width 32 (tied), 2 blocks of q 32x32, k and v 32x16, o 32x32, norms of 8 + 8, 3 x 32x64, norms 32 + 32; norm 32
BLOCK = 2 * 32 * 32 + 2 * 32 * 16 + 16 + 3 * 32 * 64 + 64
PARAMETERS = 320 * 32 + 2 * BLOCK + 32


def trained(plain: dict[str, Any], path: Path) -> RunDir:
    return train(Recipe.from_plain(plain), path, quiet=True)


def last_step(run: RunDir) -> dict[str, Any]:
    return [row for row in run.metrics() if "step_seconds" in row][-1]


def test_gold_tokens_cost_six_operations_a_parameter(plain: dict[str, Any], tmp_path: Path) -> None:
    plain["source"]["count"] = plain["batch"]["rollouts"] = 8
    plain["budget"] = {"max_steps": 1}
    run = trained(plain, tmp_path / "run")
    spent = run.info["spent"]
    assert spent["generated_tokens"] == spent["teacher_tokens"] == 0
    tokens = spent["flops"] / (6 * PARAMETERS)
    assert tokens == int(tokens) > spent["tokens"]  # prompts are read and cost as much
    assert "total_generated_tokens" not in last_step(run)


def test_frozen_weights_cost_no_third_product(plain: dict[str, Any], tmp_path: Path) -> None:
    plain["budget"] = {"max_steps": 1}
    whole = trained(plain, tmp_path / "whole").info["spent"]["flops"] / (6 * PARAMETERS)
    plain["model"]["adapter"] = {"rank": 1, "targets": ["q_proj"]}
    adapter = 2 * (32 + 32)
    assert trained(plain, tmp_path / "lora").info["spent"]["flops"] == whole * (
        4 * (PARAMETERS + adapter) + 2 * adapter
    )


def test_sampled_and_teacher_tokens_are_counted_apart(plain: dict[str, Any], tmp_path: Path) -> None:
    plain["budget"] = {"max_steps": 1}
    teacher = trained(plain, tmp_path / "teacher").path
    plain |= {
        "source": {"kind": "policy", "data": "tiny:math", "count": 4, "max_tokens": 5, "group_size": 1},
        "signal": [{"kind": "teacher", "teacher": str(teacher)}],
        "objective": ["kl_student_teacher"],
        "batch": {"rollouts": 4},
        "budget": {"max_steps": 2},
    }
    run = trained(plain, tmp_path / "run")
    spent = run.info["spent"]
    assert spent["generated_tokens"] == spent["tokens"] <= 2 * 4 * 5  # all are trained
    read = spent["teacher_tokens"]  # prompts and completions, once a step
    prompts = read - spent["generated_tokens"]
    assert prompts > 0
    # the policy reads prompts and writes, the teacher reads all, the update costs three times a forward pass
    assert spent["flops"] == 2 * PARAMETERS * (read + read + 3 * read)
    assert last_step(run)["total_teacher_tokens"] == read


def test_a_budget_of_operations(plain: dict[str, Any], tmp_path: Path) -> None:
    plain["budget"] = {"max_steps": 1}
    one = trained(plain, tmp_path / "one").info["spent"]["flops"]
    plain["budget"] = {"max_flops": 2.5 * one}
    assert 2 <= trained(plain, tmp_path / "more").info["spent"]["step"] <= 4


@pytest.mark.parametrize("limit", [{"max_tokens": 100}, {"max_seconds": 1.0}, {"max_flops": 1e9}])
def test_the_number_of_steps_is_open_where_no_step_limits(limit: dict[str, float]) -> None:
    from statewise.settings import BatchSettings, Budget
    from statewise.training.budget import Spent, num_steps, progress

    budget = Budget(max_epochs=1, **limit)
    assert num_steps(budget, BatchSettings(), 100) is None
    assert progress(Spent(tokens=50, seconds=0.5, flops=5e8), budget, BatchSettings(), 100) == 0.5


def test_tokens_of_both_streams_of_hinted_decoding_are_counted(plain: dict[str, Any], tmp_path: Path) -> None:
    hinted = {"kind": "hinted", "data": "tiny:math", "count": 2, "hint": "echo", "verifier": "answer", "max_tokens": 4}
    plain |= {"source": {**hinted, "writer": "policy"}, "batch": {"rollouts": 2}, "budget": {"max_steps": 1}}
    plain |= {"model": {"path": "tiny"}}
    run = trained(plain, tmp_path / "run")
    spent = run.info["spent"]
    assert (
        spent["tokens"] == 0 < spent["generated_tokens"] <= 2 * 4 * 5
    )  # four own tries and one hinted, of two prompts
    assert spent["teacher_tokens"] == 0 < spent["flops"]
