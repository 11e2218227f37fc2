"""The loop: determinism, resume after SIGKILL at several points, refusals, non-finite losses, interruption."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.training.conftest import losses_of, weights_of

from statewise import train
from statewise.errors import Interrupted, NonFiniteLoss, RecipeError, RunError, StatewiseError
from statewise.recipe import Recipe
from statewise.run import RunDir

LAST = 6


def run_in_child(target: Callable[[], None]) -> int:
    """Exit code of `target` in a forked process; -9 where it was killed."""
    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    process.join(120)
    assert process.exitcode is not None, "the child hangs"
    return process.exitcode


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """An uninterrupted run of the recipe of `plain`."""
    path = tmp_path_factory.mktemp("finished") / "run"
    train(_recipe(model_dir), path, quiet=True)
    return path


def _recipe(model_dir: Path, **changes: Any) -> Recipe:
    plain = {
        "model": {"path": str(model_dir)},
        "source": {"kind": "dataset", "data": "tiny:math", "count": 24},
        "signal": ["gold"],
        "objective": [{"loss": "nll", "weight": {"kind": "cll", "lambda_warmup": 0.2, "lambda_transition": 0.5}}],
        "batch": {"rollouts": 8, "micro_rows": 4},
        "optim": {"lr": 1e-2, "schedule": "cosine", "warmup": 0.2},
        "checkpoint": {"every": 2, "keep_last": 3},
        "budget": {"max_steps": LAST},
        **changes,
    }
    return Recipe.from_plain(plain, name="small")


def test_a_run_learns_and_leaves_a_readable_directory(finished: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = RunDir.open(finished)
    assert run.status == "completed"
    rows = [r for r in run.metrics() if "loss" in r]
    assert [r["step"] for r in rows] == list(range(1, LAST + 1))
    assert rows[-1]["nll"] < rows[0]["nll"] - 0.05
    for name in ("phi", "phi_median", "phi_min", "entropy", "weight", "gamma_at_min", "gamma_at_max", "tokens"):
        assert name in rows[0], sorted(rows[0])
    model = AutoModelForCausalLM.from_pretrained(run.checkpoints()[LAST])
    assert model.generation_config.use_cache
    assert AutoTokenizer.from_pretrained(run.checkpoints()[LAST]).chat_template


def test_the_same_recipe_gives_the_same_bytes(finished: Path, model_dir: Path, tmp_path: Path):
    train(_recipe(model_dir), tmp_path / "again", quiet=True)
    assert weights_of(tmp_path / "again", LAST) == weights_of(finished, LAST)
    train(_recipe(model_dir, seed=1), tmp_path / "other", quiet=True)
    assert weights_of(tmp_path / "other", LAST) != weights_of(finished, LAST)


def _killed(recipe: Recipe, path: Path, where: str, count: int) -> Callable[[], None]:
    """A training that kills itself at the `count`-th call of the function `where`."""

    def target() -> None:
        import importlib

        module_name, name = where.rsplit(".", 1)
        module = importlib.import_module(module_name)
        original, calls = getattr(module, name), [0]

        def fatal(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(module, name, fatal)
        train(recipe, path, quiet=True)

    return target


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("statewise.training.loop.take_step", 1),  # before the first checkpoint
        ("statewise.training.loop.take_step", 4),  # between two checkpoints
        ("statewise.training.checkpoint.sync", 3),  # inside the first checkpoint's write
        ("statewise.training.checkpoint.save_tensors", 2),  # inside the second's, weights written, optimizer not
        ("statewise.training.checkpoint._remove", 1),  # while pruning
        ("statewise.training.step._apply", 5),  # after a backward, before the update
    ],
)
def test_killed_and_resumed_ends_with_the_same_bytes(
    where: str, count: int, finished: Path, model_dir: Path, tmp_path: Path
):
    recipe = _recipe(model_dir)
    if "_remove" in where:
        recipe = _recipe(model_dir, checkpoint={"every": 2, "keep_last": 1})
    run = tmp_path / "run"
    assert run_in_child(_killed(recipe, run, where, count)) == -signal.SIGKILL
    assert RunDir.open(run).status == "interrupted"
    train(recipe, run, resume=True, quiet=True)
    assert weights_of(run, LAST) == weights_of(finished, LAST)
    assert weights_of(run, LAST, "optimizer.safetensors") == weights_of(finished, LAST, "optimizer.safetensors")
    assert losses_of(RunDir.open(run)) == losses_of(RunDir.open(finished))


def test_data_that_change_before_a_run_goes_on_are_noticed(model_dir: Path, tmp_path: Path):
    """Also where no count tells; brought back, the run goes on."""
    data = tmp_path / "data.jsonl"
    kinds = (
        ("dataset", ["gold"], [{"loss": "nll"}], {"rollouts": 4}),
        (
            *("policy", [{"kind": "reward", "verifier": "answer"}], [{"loss": "reinforce"}]),
            {"rollouts": 4},
        ),
    )
    for kind, signal_of, objective, batch in kinds:
        data.write_text('{"prompt": "Is it 1?", "completion": "It is 1.", "answer": "1"}\n' * 8)
        source = {"kind": kind, "data": str(data)} | ({"max_tokens": 4, "group_size": 4} if kind == "policy" else {})
        parts = {"source": source, "signal": signal_of, "objective": objective, "batch": batch}
        recipe, out = _recipe(model_dir, **parts, budget={"max_steps": 2}), tmp_path / kind
        train(recipe, out, quiet=True)
        before = data.read_text()
        data.write_text(before.replace("1", "2"))
        with pytest.raises(RunError, match="data.jsonl gives other samples than when the run began"):
            train(recipe, out, resume=True, quiet=True)
        data.write_text(before)
        train(recipe, out, resume=True, quiet=True)
        assert RunDir.open(out).status == "completed"


def test_a_damaged_checkpoint_is_passed_over_and_said(
    finished: Path, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    recipe, run = _recipe(model_dir), tmp_path / "run"
    assert run_in_child(_killed(recipe, run, "statewise.training.loop.take_step", 6)) == -signal.SIGKILL
    damaged = run / "checkpoints" / "step_000004" / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    train(recipe, run, resume=True)
    said = capsys.readouterr().err
    assert "step 4 can't be used: model.safetensors has other bytes" in said
    assert "resuming at step 2" in said
    assert weights_of(run, LAST) == weights_of(finished, LAST)


def test_lora_resumes_to_the_same_bytes(model_dir: Path, tmp_path: Path):
    recipe = _recipe(model_dir, model={"path": str(model_dir), "adapter": {"rank": 4, "dropout": 0.1}})
    train(recipe, tmp_path / "whole", quiet=True)
    assert run_in_child(_killed(recipe, tmp_path / "cut", "statewise.training.loop.take_step", 4)) == -signal.SIGKILL
    train(recipe, tmp_path / "cut", resume=True, quiet=True)
    file = "adapter_model.safetensors"
    assert weights_of(tmp_path / "cut", LAST, file) == weights_of(tmp_path / "whole", LAST, file)
    config = json.loads(weights_of(tmp_path / "cut", LAST, "adapter_config.json"))
    assert config["base_model_name_or_path"] == str(model_dir)
    assert not list((tmp_path / "whole").rglob("README.md")), "PEFT's form, in which nothing is filled in"


def test_the_directory_is_refused_while_another_process_writes(model_dir: Path, tmp_path: Path):
    run = RunDir.create(tmp_path / "run", _recipe(model_dir))
    with run.lock(), pytest.raises(RunError, match=f"in use by process {os.getpid()}"):
        train(_recipe(model_dir), tmp_path / "run", resume=True, quiet=True)


def test_an_existing_run_is_not_overwritten(finished: Path, model_dir: Path):
    with pytest.raises(RunError, match="--resume"):
        train(_recipe(model_dir), finished, quiet=True)
    with pytest.raises(RunError, match="same recipe"):
        train(_recipe(model_dir, seed=5), finished, resume=True, quiet=True)


def test_resuming_a_finished_run_changes_nothing(finished: Path, model_dir: Path):
    before = weights_of(finished, LAST), (finished / "metrics.jsonl").read_bytes()
    train(_recipe(model_dir), finished, resume=True, quiet=True)
    assert (weights_of(finished, LAST), (finished / "metrics.jsonl").read_bytes()) == before


def test_a_non_finite_loss_names_the_samples_and_keeps_the_checkpoint(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from statewise.weights import CLL

    original = CLL.__call__

    def broken(self: CLL, stats: Any, batch: Any) -> Any:
        return original(self, stats, batch) * (float("nan") if batch.progress > 0.4 else 1.0)

    monkeypatch.setattr(CLL, "__call__", broken)
    with pytest.raises(NonFiniteLoss, match="math-train-") as caught:
        train(_recipe(model_dir), tmp_path / "run", quiet=True)
    assert "step 3" in str(caught.value)
    run = RunDir.open(tmp_path / "run")
    assert run.status == "failed" and "NonFiniteLoss" in run.info["error"]
    assert list(run.checkpoints()) == [2]


def test_an_interrupt_writes_a_checkpoint_and_resumes(
    finished: Path, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from statewise.training import loop

    original = loop.take_step

    def interrupted(training: Any) -> Any:
        if training.spent.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return original(training)

    monkeypatch.setattr(loop, "take_step", interrupted)
    with pytest.raises(Interrupted, match="statewise train --resume"):
        train(_recipe(model_dir), tmp_path / "run", quiet=True)
    run = RunDir.open(tmp_path / "run")
    assert run.status == "interrupted" and max(run.checkpoints()) == 3
    monkeypatch.setattr(loop, "take_step", original)
    train(_recipe(model_dir), tmp_path / "run", resume=True, quiet=True)
    assert weights_of(tmp_path / "run", LAST) == weights_of(finished, LAST)


@pytest.mark.parametrize(
    "batch", [{"rollouts": 8}, {"rollouts": 8, "micro_rows": 1}, {"rollouts": 8, "pack": 256, "micro_tokens": 256}]
)
def test_any_split_of_a_batch_gives_the_same_losses(batch: dict, finished: Path, model_dir: Path, tmp_path: Path):
    train(_recipe(model_dir, batch=batch), tmp_path / "run", quiet=True)
    assert losses_of(RunDir.open(tmp_path / "run")) == pytest.approx(losses_of(RunDir.open(finished)), abs=2e-5)


@pytest.mark.parametrize("budget", [{"max_tokens": 700}, {"max_epochs": 1.0}, {"max_seconds": 1e-6}, {"max_steps": 0}])
def test_budgets(budget: dict, model_dir: Path, tmp_path: Path):
    run = train(_recipe(model_dir, budget=budget), tmp_path / "run", quiet=True)
    rows = [r for r in run.metrics() if "loss" in r]
    tokens = [r["total_tokens"] for r in rows]
    if "max_tokens" in budget:
        assert tokens[-1] >= 700 > (tokens[-2] if len(tokens) > 1 else 0)
    else:
        assert len(rows) == {"max_epochs": 3, "max_seconds": 1, "max_steps": 0}[next(iter(budget))]


def test_evaluation_and_keep_best(model_dir: Path, tmp_path: Path):
    recipe = _recipe(
        model_dir,
        checkpoint={"every": 0, "keep_last": 1, "keep_best": "tiny:text", "higher_is_better": False},
        eval={"tasks": [{"kind": "tiny:text", "count": 20}], "every": 2},
        optim={"lr": 3e-2},
    )
    run = train(recipe, tmp_path / "run", quiet=True)
    scores = {step: tasks["tiny:text"]["mean"] for step, tasks in run.evals().items()}
    assert sorted(scores) == [0, 2, 4, 6]
    best = min((s for s in scores if s > 0), key=lambda s: scores[s])
    assert set(run.checkpoints()) == {best, 6}
    assert (run.eval_dir(4) / "summary.json").is_file()


def test_gradient_checkpointing_and_bfloat16_run(model_dir: Path, tmp_path: Path):
    model = {"path": str(model_dir), "gradient_checkpointing": True, "dtype": "bfloat16"}
    run = train(_recipe(model_dir, model=model, budget={"max_steps": 1}), tmp_path / "run", quiet=True)
    assert losses_of(run)[0] > 0


def test_a_missing_model_is_a_clear_error(tmp_path: Path):
    with pytest.raises((RecipeError, Exception), match="no_such_model"):
        train(_recipe(Path("no_such_model")), tmp_path / "run", quiet=True)
    assert RunDir.open(tmp_path / "run").status == "failed"


def test_a_run_that_failed_before_its_first_step_may_be_replaced(model_dir: Path, tmp_path: Path):
    (tmp_path / "torn.jsonl").write_text("{")
    source = {"kind": "dataset", "data": str(tmp_path / "torn.jsonl")}
    with pytest.raises(StatewiseError):
        train(_recipe(model_dir, source=source), tmp_path / "run", quiet=True)
    assert RunDir.open(tmp_path / "run").status == "failed"
    assert train(_recipe(model_dir, budget={"max_steps": 1}), tmp_path / "run", quiet=True).status == "completed"
