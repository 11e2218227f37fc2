"""EffOPD's extrapolation: when it is tried, which candidate stays, and resuming."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.training.conftest import losses_of, weights_of
from tests.training.test_distributed import run_on, same
from tests.training.test_loop import _killed, run_in_child
from torch import nn

from statewise import evals, train
from statewise.errors import RecipeError
from statewise.recipe import Recipe
from statewise.run import RunDir
from statewise.training.extrapolation import Extrapolation

TASK = {"kind": "tiny:text", "count": 8}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)


def extrapolated(
    weights: list[float], best: float, monkeypatch: pytest.MonkeyPatch, *, better: bool = True, **settings: Any
) -> tuple[Model, list[dict[str, float]]]:
    """A weight that starts at 0 and is set to `weights` step by step; the score is -|w - best|, or a loss |w - best|."""
    model = Model()
    with torch.no_grad():
        model.layer.weight.fill_(0.0)

    def run(policy: Any, tasks: Any, **_: Any) -> dict[str, Any]:
        gap = abs(float(model.layer.weight.detach()) - best)
        return {"task": SimpleNamespace(mean=-gap if better else gap, higher_is_better=better)}

    monkeypatch.setattr(evals, "run", run)
    plain = {
        "source": {"kind": "dataset", "data": "tiny:math"},
        "signal": ["gold"],
        "objective": ["nll"],
        "budget": {"max_steps": 1},
        "optim": {"extrapolate": {"task": TASK, **settings}},
    }
    accelerator = SimpleNamespace(is_main_process=True, num_processes=1)
    policy: Any = SimpleNamespace(model=model)
    start = {"layer.weight": torch.zeros(1, 1)}
    hook = Extrapolation(Recipe.from_plain(plain), policy, accelerator, start, {})
    rows = []
    for step, value in enumerate(weights, 1):
        with torch.no_grad():
            model.layer.weight.fill_(value if step == 1 else model.layer.weight.item() + value)
        rows.append(hook.after_step(step))
    return model, rows


def test_candidates_are_taken_while_the_score_does_not_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = extrapolated([1.0], 7.2, monkeypatch)  # 1 + 2k: 3, 5, 7, 9 is worse
    assert rows[0]["extrapolated"] == 3 and model.layer.weight.item() == pytest.approx(7.0)
    assert rows[0]["extrapolation_score"] == pytest.approx(-0.2)


def test_the_first_failure_leaves_the_weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = extrapolated([1.0], 1.5, monkeypatch)
    assert rows[0]["extrapolated"] == 0 and model.layer.weight.item() == 1.0


def test_no_more_than_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = extrapolated([1.0], 100.0, monkeypatch, candidates=2, factor=3.0)
    assert rows[0]["extrapolated"] == 2 and model.layer.weight.item() == pytest.approx(7.0)


def test_an_equal_score_is_enough_unless_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    assert extrapolated([1.0], 2.0, monkeypatch)[1][0]["extrapolated"] == 1  # |1 - 2| = |3 - 2|
    assert extrapolated([1.0], 2.0, monkeypatch, strict=True)[1][0]["extrapolated"] == 0


def test_of_a_loss_lower_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    assert extrapolated([1.0], 7.2, monkeypatch, better=False)[1][0]["extrapolated"] == 3


def test_at_powers_of_two_from_what_the_last_one_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 -> 5 at step 1; then + 1 a step: at step 2 it is 6, from 5, so candidates are 8, 10, ...; at 4, from 10: 12 -> 16."""
    model, rows = extrapolated([1.0, 1.0, 1.0, 1.0, 1.0], 15.0, monkeypatch, candidates=2)
    assert [row.get("extrapolated") for row in rows] == [2, 2, None, 1, None]
    assert model.layer.weight.item() == pytest.approx(17.0)


def test_killed_and_resumed_ends_with_the_same_bytes(plain: dict[str, Any], tmp_path: Path) -> None:
    plain["optim"] = {"lr": 3e-3, "extrapolate": {"task": TASK, "factor": 0.5}}
    recipe = Recipe.from_plain(plain, name="small")
    whole = train(recipe, tmp_path / "whole", quiet=True)
    tried = {row["step"]: row["extrapolated"] for row in whole.metrics() if "extrapolated" in row}
    assert list(tried) == [1, 2, 4] and any(tried.values())
    assert run_in_child(_killed(recipe, tmp_path / "cut", "statewise.training.loop.take_step", 4)) == -signal.SIGKILL
    train(recipe, tmp_path / "cut", resume=True, quiet=True)
    for file in ("model.safetensors", "optimizer.safetensors", "components.safetensors"):
        assert weights_of(tmp_path / "cut", 6, file) == weights_of(tmp_path / "whole", 6, file)
    assert losses_of(RunDir.open(tmp_path / "cut")) == losses_of(whole)


def test_two_processes_equal_one(plain: dict[str, Any], tmp_path: Path) -> None:
    plain["optim"] = {"lr": 3e-3, "extrapolate": {"task": TASK, "factor": 0.5}}
    same(run_on(1, plain, tmp_path / "one"), run_on(2, plain, tmp_path / "two"))


def test_an_unknown_task_is_refused(plain: dict[str, Any]) -> None:
    plain["optim"] = {"extrapolate": {"task": "tiny:maths"}}
    with pytest.raises(RecipeError, match="did you mean 'tiny:math'"):
        Recipe.from_plain(plain)
