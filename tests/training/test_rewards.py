"""Policy states with rewards in runs: the shipped recipes, what is learnt, equivalences, steps without anything to train."""

import shutil
import signal as signals
from pathlib import Path
from typing import Any

import pytest
from tests.training.conftest import losses_of, weights_of
from tests.training.test_distributed import run_on, same
from tests.training.test_loop import _killed, run_in_child

from statewise import train
from statewise.errors import RecipeError
from statewise.recipe import Recipe
from statewise.run import RunDir
from statewise.settings import Budget
from statewise.sources.policy import PolicySource
from statewise.training import alarms, budget
from statewise.training.alarms import CAUSES, PATIENCE, TOLD, Alarms, why_nothing

SHIPPED = ["grpo", "dr_grpo", "dapo", "rloo", "reinforce", "rejection"]
# The random model knows no arithmetic, but now and then it writes a digit.
DIGIT = {"kind": "regex", "pattern": "[0-4]"}
ANYTHING = {"kind": "regex", "pattern": "(?s)."}
DROP = "signal.0.zero_variance=drop"


def small(name: str, model_dir: Path, *changes: str, **settings: Any) -> Recipe:
    """A shipped recipe on the small model: six steps of 16 completions in groups of four."""
    recipe = Recipe.load(name, [f"model.path={model_dir}", "batch.rollouts=16", "budget.max_steps=6", "eval.tasks=[]"])
    plain = recipe.to_plain()
    plain["source"] |= {"count": 12, "group_size": 4, "max_tokens": 16}
    if name == "rejection":
        plain["source"] |= {"verifier": ANYTHING, "max_tokens": 80}
    else:
        plain["signal"] = [{**plain["signal"][0], "verifier": DIGIT}]
    plain["optim"] = {"lr": 1e-2}
    return Recipe.from_plain(plain | settings, changes, name=name)


def rows_of(run: RunDir) -> list[dict[str, Any]]:
    return [row for row in run.metrics() if "total_tokens" in row]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_run(name: str, model_dir: Path, tmp_path: Path):
    run = train(small(name, model_dir, "budget.max_steps=3"), tmp_path / "run", quiet=True)
    rows = rows_of(run)
    assert len(rows) == 3 and any(row.get("grad_norm", 0) > 0 for row in rows)
    for row in rows:
        assert {"completion_tokens", "truncated_share", "num_resampled", "num_verifier_timeouts"} <= set(row)
        assert row["behavior_gap"] < 1e-5 if "behavior_gap" in row else row["tokens"] == 0
    assert Recipe.from_plain(run.recipe().to_plain()).hash == run.recipe_hash


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_the_reward_rises(name: str, model_dir: Path, tmp_path: Path):
    changes = ["budget.max_steps=25", "batch.rollouts=64", "source.group_size=8", "batch.micro_rows=64"]
    run = train(small(name, model_dir, *changes), tmp_path / "run", quiet=True)
    rewards = [row["reward"] for row in rows_of(run)]
    assert sum(rewards[:3]) / 3 < 0.5 and min(rewards[-3:]) > 0.9, rewards


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_ratio_of_a_fresh_policy_is_one(
    temperature: float, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    changes = [f"source.temperature={temperature}", "budget.max_steps=2", "batch.minibatches=2", "batch.epochs=2"]
    for row in rows_of(train(small("grpo", model_dir, *changes), tmp_path / "run", quiet=True)):
        assert row["behavior_gap"] < 1e-5
        assert row["ratio_min"] == pytest.approx(1, abs=1e-4) and row["ratio_max"] == pytest.approx(1, abs=1e-4)
    if temperature != 1.0:
        monkeypatch.setattr(PolicySource, "policy_temperature", 1.0)
        rows = rows_of(train(small("grpo", model_dir, *changes), tmp_path / "wrong", quiet=True))
        assert rows[0]["behavior_gap"] > 0.01, "a trainer at another temperature must show"


def test_the_reference_is_meant_at_the_temperature_of_the_states(model_dir: Path, tmp_path: Path):
    objective = [
        {"loss": "clip"},
        {"loss": {"kind": "reference_kl", "direction": "policy_reference"}, "coef": 0.1},
    ]
    recipe = small("grpo", model_dir, "source.temperature=0.5", "budget.max_steps=1")
    plain = recipe.to_plain() | {"objective": objective, "signal": [*recipe.to_plain()["signal"], "reference"]}
    (row,) = rows_of(train(Recipe.from_plain(plain), tmp_path / "run", quiet=True))
    assert row["reference_kl/token_loss"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", ["grpo", "rejection"])
def test_any_split_of_a_batch_gives_the_same_losses(name: str, model_dir: Path, tmp_path: Path):
    found = []
    for index, split in enumerate([[], ["batch.micro_rows=1"], ["batch.pack=256", "batch.micro_tokens=256"]]):
        recipe = small(name, model_dir, "budget.max_steps=3", *split)
        found.append([row["grad_norm"] for row in rows_of(train(recipe, tmp_path / str(index), quiet=True))])
    assert found[1] == pytest.approx(found[0], rel=1e-3, abs=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", ["dapo", "rejection"])
def test_killed_and_resumed_ends_with_the_same_bytes(name: str, model_dir: Path, tmp_path: Path):
    recipe = small(name, model_dir, checkpoint={"every": 2})
    whole, cut = train(recipe, tmp_path / "whole", quiet=True).path, tmp_path / "cut"
    assert run_in_child(_killed(recipe, cut, "statewise.training.loop.take_step", 4)) == -signals.SIGKILL
    train(recipe, cut, resume=True, quiet=True)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert weights_of(cut, 6, file) == weights_of(whole, 6, file), file
    assert losses_of(RunDir.open(cut)) == losses_of(RunDir.open(whole))


@pytest.mark.parametrize(("name", "measure"), [("grpo", "reward"), ("dapo", "num_draws"), ("rejection", "num_kept")])
def test_two_processes_equal_one(name: str, measure: str, model_dir: Path, tmp_path: Path):
    # Not Adam: where a gradient cancels, it would make steps of the rounding noise.
    plain = small(name, model_dir, optim={"optimizer": "sgd", "lr": 0.5}).to_plain()
    one, two = run_on(1, plain, tmp_path / "one"), run_on(2, plain, tmp_path / "two")
    same(one, two)
    for column in ("completion_tokens", "truncated_share", measure):
        assert [r[column] for r in rows_of(two)] == [r[column] for r in rows_of(one)]


def test_sharded_parameters_are_refused(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from statewise.training import world

    monkeypatch.setattr(world, "is_sharded", lambda learner: True)
    with pytest.raises(RecipeError, match="while its parameters are sharded"):
        train(small("grpo", model_dir), tmp_path / "run", quiet=True)


def test_steps_with_nothing_to_train_leave_the_weights(model_dir: Path, tmp_path: Path):
    """Every group dropped: no update, no failure, a warning after a while."""
    changes = [f"budget.max_steps={PATIENCE}", "signal.0.verifier.pattern=no such text", DROP]
    recipe = small("dapo", model_dir, *changes)
    run = train(recipe, tmp_path / "run", quiet=True)
    assert run.status == "completed" and run.info["spent"]["tokens"] == 0
    assert all(row["num_empty_updates"] == 1 and row["zero_variance_share"] == 1 for row in rows_of(run))
    alarm, last = run.info["warnings"]
    assert alarm.startswith(f"step {PATIENCE}: all rewards of a step were equal")
    assert last.startswith("no token was trained: ") and "zero_variance_share 1" in last
    start = train(small("dapo", model_dir, "budget.max_steps=0"), tmp_path / "start", quiet=True)
    assert weights_of(run.path, PATIENCE) == weights_of(start.path, 0)


def test_groups_of_equal_rewards_are_replaced(model_dir: Path, tmp_path: Path):
    """DAPO's dynamic sampling: every step trains as many groups as were asked for, of as many draws as that takes."""
    rows = rows_of(train(small("dapo", model_dir), tmp_path / "run", quiet=True))
    for row in rows:
        kept = row["num_groups"] - row["num_groups_dropped"]
        assert row["num_groups"] == 4 * row["num_draws"] and row["num_groups_missing"] == 0
        assert kept - row["num_groups_spare"] == 4 and kept - row["num_groups_spare"] > 4 - 4 * row["num_draws"]
        assert row["zero_variance_share"] == pytest.approx(row["num_groups_dropped"] / row["num_groups"])
    assert max(row["num_draws"] for row in rows) > 1 == min(row["num_draws"] for row in rows)
    sampled = sum(row["completion_tokens"] * 4 * row["num_groups"] for row in rows)
    assert rows[-1]["total_generated_tokens"] == pytest.approx(sampled), "what is left out was sampled all the same"


def test_a_batch_that_can_not_be_filled(model_dir: Path, tmp_path: Path):
    """What is there is trained, and a warning says so; a run without redraws has none of the counts."""
    changes = [f"budget.max_steps={PATIENCE}", "signal.0.max_draws=2", "optim.lr=0"]
    changes += [
        'signal.0.verifier.pattern="7"',
        "signal.0.self_test=false",
        "source.max_tokens=2",
        "source.truncated=keep",
    ]
    run = train(small("dapo", model_dir, *changes), tmp_path / "run", quiet=True)
    rows = rows_of(run)
    assert all(row["num_draws"] == 2 and row["num_groups_missing"] > 0 for row in rows)
    assert any(0 < row["num_groups_missing"] < 4 and row["tokens"] > 0 for row in rows)
    assert any("was not full after max_draws draws" in warning for warning in run.info["warnings"])
    dropped = rows_of(train(small("dapo", model_dir, DROP, "budget.max_steps=1"), tmp_path / "drop", quiet=True))
    assert not {name for name in dropped[0] if name.startswith("num_groups") or name == "num_draws"}


def test_epochs_end_when_the_prompts_were_drawn(model_dir: Path, tmp_path: Path):
    """12 prompts, four a draw; each prompt is drawn once an epoch, whichever step it falls to."""
    budget = {"max_epochs": 2}
    run = train(small("dapo", model_dir, budget=budget), tmp_path / "run", quiet=True)
    spent = run.info["spent"]
    assert spent["step"] + spent["redraws"] >= 6 > spent["step"] == len(rows_of(run))
    assert sum(row["num_draws"] for row in rows_of(run)) == spent["step"] + spent["redraws"]


def test_alarms_count_steps_in_a_row():
    seen = Alarms()
    flat, varied = {"reward_std": 0.0, "truncated_share": 1.0}, {"reward_std": 0.1, "truncated_share": 1.0}
    steps = [flat] * (PATIENCE - 1) + [varied] + [flat] * (PATIENCE + 5)
    found = {n: texts for n, row in enumerate(steps, 1) if (texts := seen.see({"step": n, **row}))}
    assert {n: len(texts) for n, texts in found.items()} == {PATIENCE: 1, 2 * PATIENCE: 1}
    assert "max_tokens" in found[PATIENCE][0] and "rewards" in found[2 * PATIENCE][0]
    assert seen.see({"step": 99, "eval/tiny:math": 0.0}) == []
    again = [text for n in range(9) for row in [varied, *[flat] * PATIENCE] for text in seen.see({"step": n, **row})]
    assert len(again) == TOLD - 1 and again[-1].endswith("This is not told again.")


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"accepted_share": 0.0, "truncated_share": 1.0}, "Most completions are cut at source.max_tokens"),
        ({"accepted_share": 0.0, "truncated_share": 0.0}, "The verifier accepts nothing"),
        ({"a/accepted_share": 0.0, "a/truncated_share": 0.25}, "The verifier accepts nothing"),
        ({"zero_variance_share": 1.0, "truncated_share": 0.0}, "All rewards of a group are equal"),
    ],
)
def test_why_nothing_was_trained(row: dict[str, float], cause: str):
    told = why_nothing([row, row])
    assert told.endswith(f"{next(text for _, text in CAUSES.values() if text.startswith(cause))}")
    assert all(f"{name.rpartition('/')[2]} {value:g}" in told for name, value in row.items()) and "of 2 steps" in told
    assert why_nothing([{"tokens": 0}]) == "nothing tells why in 1 step."


def test_a_verifier_that_accepts_nothing_is_told(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(alarms, "PATIENCE", 2)
    changes = ['source.verifier={ kind = "regex", pattern = "no such text" }', "budget.max_steps=3"]
    run = train(small("rejection", model_dir, *changes), tmp_path / "run")
    first, last = run.info["warnings"]
    assert first.startswith("step 2: no completion was accepted, 2 steps in a row") and "accepted_share 0" in first
    assert last.startswith("no token was trained: truncated_share ") and "accepted_share 0 (mean of 3 steps)" in last
    said = capsys.readouterr().err
    assert f"warning: {last}" in said and "step=1 progress=0.333 accepted_share=0 " in said
    train(small("rejection", model_dir, *changes), run.path, resume=True, quiet=True)
    assert run.info["warnings"] == [first, last]


def test_the_verifier_is_tested_before_training(model_dir: Path, tmp_path: Path):
    recipe = small("grpo", model_dir, 'signal.0.verifier={ kind = "exact" }', "source.steps=[2]")
    plain = recipe.to_plain()
    plain["source"]["columns"] = {"answer": "steps"}
    plain["signal"][0]["verifier"] = {"kind": "regex", "pattern": "(x)", "sample": "{answer}"}
    with pytest.raises(RecipeError, match=r"signal\.reward\.verifier: 'regex' gives 0 to the reference answer"):
        train(Recipe.from_plain(plain), tmp_path / "run", quiet=True)
    assert rows_of(RunDir.open(tmp_path / "run")) == []


def test_a_reward_function_is_part_of_the_hash(model_dir: Path, tmp_path: Path):
    file, hashes = tmp_path / "mine.py", []
    plain = small("grpo", model_dir).to_plain()
    plain["signal"][0]["verifier"] = {"kind": "function", "call": "mine.py:score"}
    for body in ("1.0", "2.0"):
        file.write_text(f"def score(text, example):\n    return {body}\n")
        hashes.append(Recipe.from_plain(plain, base_dir=tmp_path).hash)
    assert hashes[0] != hashes[1]


def test_a_budget_of_tokens_that_nothing_spends_ends(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A policy that earns nothing any more would sample for ever; a killed run ends at the same step."""
    monkeypatch.setattr(budget, "IDLE_STEPS", 5)
    changes = ["signal.0.verifier.pattern=no such text", DROP, "budget={max_tokens=100}", "checkpoint.every=3"]
    recipe = small("dapo", model_dir, *changes)
    run = train(recipe, tmp_path / "run", quiet=True)
    assert run.status == "completed" and run.info["spent"]["step"] == run.info["spent"]["idle"] == 5
    assert run.info["warnings"][-1].startswith("ended at step 5: the last 5 steps trained no token")
    for step in (4, 5):
        shutil.rmtree(run.path / "checkpoints" / f"step_{step:06d}", ignore_errors=True)
    again = train(recipe, run.path, resume=True, quiet=True)
    assert again.info["spent"]["step"] == 5
    assert not budget.is_stuck(budget.Spent(idle=5), Budget(max_tokens=1, max_steps=9))
