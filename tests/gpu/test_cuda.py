"""What has to hold on a GPU, in bf16: `make test-gpu`. Skipped where there is none."""

from pathlib import Path
from typing import Any

import pytest
import torch

from statewise.recipe import Recipe
from statewise.training.loop import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SMALL = [
    "budget.max_steps=3",
    "budget.max_tokens=none",
    "budget.max_epochs=none",
    "batch.rollouts=8",
    "eval.tasks=[]",
    "eval.probe=off",
]
RECIPES: dict[str, list[str]] = {
    "tiny_sft": [],
    "tiny_idft": [],
    "grpo": [],
    "dpo": [],
    "rejection": [],
    "opd_full": ["signal.0.teacher=TEACHER"],
    "opd_continuation": ["source.teacher=TEACHER"],
}


def steps(name: str, out: Path, *overrides: str) -> list[dict[str, Any]]:
    run = train(Recipe.load(name, [*SMALL, *overrides]), out, quiet=True)
    return [row for row in run.metrics() if "step_seconds" in row]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("teacher") / "run"
    steps("tiny_sft", out)
    return out


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_train_in_bf16(name: str, teacher: Path, tmp_path: Path) -> None:
    overrides = [text.replace("TEACHER", str(teacher)) for text in RECIPES[name]]
    rows = steps(name, tmp_path / "run", "model.dtype=bfloat16", *overrides)
    assert len(rows) == 3
    losses = [row["loss"] for row in rows if "loss" in row]  # a step of `rejection` may accept nothing
    assert losses and all(abs(loss) < 100 for loss in losses)


def test_the_first_loss_is_that_of_the_cpu(tmp_path: Path) -> None:
    on_cpu = 0.0501854
    assert steps("tiny_sft", tmp_path / "run", "model.dtype=float32")[0]["loss"] == pytest.approx(on_cpu, abs=1e-4)


def test_the_sampler_agrees_with_the_trainer(tmp_path: Path) -> None:
    rows = steps("grpo", tmp_path / "run", "model.dtype=float32")
    gaps = [value for row in rows for name, value in row.items() if "gap" in name and "max" not in name]
    assert gaps and max(map(abs, gaps)) < 1e-3
