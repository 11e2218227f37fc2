"""Runs whose rollouts come from an engine with weights of its own."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.models.test_vllm import GAP, StandIn
from tests.training.conftest import weights_of
from tests.training.test_rewards import small

from statewise import train
from statewise.errors import EndpointError, RecipeError
from statewise.models.load import load_policy
from statewise.models.vllm import VllmSampler
from statewise.recipe import Recipe


@pytest.fixture
def engines(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """Engines that stand in for vLLM, one a run; each starts with the weights on the disk."""
    found: list[StandIn] = []

    def open_vllm(recipe: Recipe, policy: Any, accelerator: Any, say: Any) -> VllmSampler:
        found.append(StandIn(load_policy(str(model_dir))))
        return VllmSampler(found[-1], GAP)

    monkeypatch.setattr("statewise.training.rollouts.open_vllm", open_vllm)
    return found


def test_an_engine_is_handed_the_weights_of_each_step(model_dir: Path, engines: list[StandIn], tmp_path: Path):
    """It draws as the built-in sampler does, so the run has the same bytes; also when it is resumed."""
    changes = ["batch.minibatches=2", "checkpoint.every=2", "budget.max_steps=4"]
    plain = train(small("grpo", model_dir, *changes), tmp_path / "plain", quiet=True).path
    recipe = small("grpo", model_dir, *changes, "model.sampler=vllm")
    run = train(recipe, tmp_path / "run", quiet=True).path
    assert weights_of(run, 4) == weights_of(plain, 4) and engines[0].versions == [0, 1, 2, 3]
    shutil.rmtree(run / "checkpoints" / "step_000004")
    train(recipe, run, resume=True, quiet=True)
    assert weights_of(run, 4) == weights_of(plain, 4) and engines[1].versions == [2, 3]


def test_an_engine_that_keeps_old_weights_stops_the_run(
    model_dir: Path, engines: list[StandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = StandIn.hand_over

    def hand_over(self: StandIn, weights: Any) -> None:
        self.deaf = weights.version >= 2
        before(self, weights)

    monkeypatch.setattr(StandIn, "hand_over", hand_over)
    recipe = small("grpo", model_dir, "model.sampler=vllm", "optim.lr=3e-2")
    with pytest.raises(EndpointError, match=r"hand-over of step 2(.|\n)*Stopped before step 3 with a checkpoint"):
        train(recipe, tmp_path / "run", quiet=True)


def test_vllm_inside_takes_one_process(model_dir: Path, tmp_path: Path):
    from types import SimpleNamespace

    from statewise.training.rollouts import open_vllm

    recipe = small("grpo", model_dir, "model.sampler=vllm")
    policy = load_policy(str(model_dir))
    with pytest.raises(RecipeError, match="this run has 2 processes, and vLLM inside a process serves one"):
        open_vllm(recipe, policy, SimpleNamespace(num_processes=2, is_main_process=True), lambda text: None)
