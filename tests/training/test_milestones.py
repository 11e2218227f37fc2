"""Saving comes before evaluating: an evaluation that fails or is killed costs no training, and is made up for."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.training.conftest import weights_of
from tests.training.test_loop import run_in_child

from statewise import train
from statewise.errors import Interrupted, StatewiseError
from statewise.recipe import Recipe
from statewise.run import RunDir

LAST = 4


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Callable[..., Recipe]:
    """A recipe of four steps, evaluated by a verifier that raises while there is a file `broken` beside it."""
    base = tmp_path_factory.mktemp("recipe")
    (base / "judge.py").write_text(
        "from pathlib import Path\n\n"
        "def score(text, example):\n"
        "    assert not Path(__file__).with_name('broken').exists(), 'the judge is out'\n"
        "    return len(text) % 2\n"
    )
    (base / "ask.jsonl").write_text('{"prompt": "Is it 1?", "answer": "1"}\n' * 3)
    task = {"kind": "generative", "name": "ask", "data": "ask.jsonl", "verifier": "judge.py:score", "max_new_tokens": 4}

    def made(evaluate_every: int, **checkpoint: Any) -> Recipe:
        plain = {
            "model": {"path": str(model_dir)},
            "source": {"kind": "dataset", "data": "tiny:math", "count": 24},
            "signal": ["gold"],
            "objective": ["nll"],
            "batch": {"rollouts": 4},
            "checkpoint": checkpoint,
            "eval": {"tasks": [task], "probe": "off", "every": evaluate_every, "at_start": False},
            "budget": {"max_steps": LAST},
        }
        return Recipe.from_plain(plain, name="small", base_dir=base)

    return made


def left(path: Path) -> dict[str, Any]:
    """What a run leaves, without times and places: weights, metrics, evaluations."""
    run = RunDir.open(path)
    rows = [{k: v for k, v in row.items() if "second" not in k} for row in run.metrics()]
    records = {f.relative_to(path): f.read_bytes() for f in sorted(path.glob("evals/*/*.jsonl"))}
    names = ("model.safetensors", "optimizer.safetensors")
    weights = {(step, name): weights_of(path, step, name) for step in run.checkpoints() for name in names}
    return {"status": run.status, "rows": rows, "records": records, **weights}


@pytest.mark.parametrize(("every", "step"), [(0, LAST), (2, 2)])
def test_an_evaluation_that_fails_loses_no_training(
    every: int, step: int, make: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    recipe, run = make(every, every=2), tmp_path / "run"
    train(recipe, tmp_path / "whole", quiet=True)
    broken = recipe.base_dir / "broken"
    broken.touch()
    try:
        with pytest.raises(StatewiseError, match="the judge is out"):
            train(recipe, run)
    finally:
        broken.unlink()
    assert max(RunDir.open(run).checkpoints()) == step
    said = capsys.readouterr().err
    assert f"evaluation at step {step} failed" in said and f"statewise train --resume {run}" in said
    train(recipe, run, resume=True, quiet=True)
    assert left(run) == left(tmp_path / "whole")


@pytest.mark.parametrize(("call", "step"), [(1, 2), (2, LAST)])
@pytest.mark.parametrize("checkpoint", [{"every": 2}, {"keep_last": 1, "keep_best": "ask"}])
def test_killed_while_it_evaluates(call: int, step: int, checkpoint: dict, make: Callable[..., Recipe], tmp_path: Path):
    recipe, run = make(2, **checkpoint), tmp_path / "run"
    train(recipe, tmp_path / "whole", quiet=True)

    def target() -> None:
        from statewise import evals

        original, calls = evals.run, [0]

        def fatal(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        evals.run = fatal
        train(recipe, run, quiet=True)

    assert run_in_child(target) == -signal.SIGKILL
    assert max(RunDir.open(run).checkpoints()) == step
    train(recipe, run, resume=True, quiet=True)
    assert left(run) == left(tmp_path / "whole")


def test_a_run_that_is_stopped_saves_first_and_evaluates_when_it_goes_on(
    make: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from statewise.training import loop

    recipe, run, original = make(2), tmp_path / "run", loop.take_step
    train(recipe, tmp_path / "whole", quiet=True)

    def stopped(training: Any) -> Any:
        if training.spent.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(training)

    monkeypatch.setattr(loop, "take_step", stopped)
    with pytest.raises(Interrupted):
        train(recipe, run, quiet=True)
    assert RunDir.open(run).evals() == {} and list(RunDir.open(run).checkpoints()) == [2]
    monkeypatch.setattr(loop, "take_step", original)
    train(recipe, run, resume=True, quiet=True)
    resumed, whole = left(run), left(tmp_path / "whole")
    assert resumed["rows"] == whole["rows"] and resumed["records"] == whole["records"]
