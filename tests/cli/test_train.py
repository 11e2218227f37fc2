"""`statewise train`: what it passes on, what it prints, and its exit codes. The loop itself is replaced."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from statewise.errors import DataError, Interrupted, NonFiniteLoss, StatewiseError
from statewise.run import RunDir


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A loop that makes the run directory, logs two steps and records how it was called."""
    calls: list[dict[str, Any]] = []

    def train(recipe: Any, target: Path, **options: Any) -> RunDir:
        calls.append({"recipe": recipe, "target": target, **options})
        run = RunDir.open(target) if options["resume"] else RunDir.create(target, recipe)
        run.update(status="running")
        run.log({"step": 0, "eval/a": 0.5, "eval/a/low": 0.4, "eval/a/high": 0.6})
        run.log({"step": 1, "loss": 2.0})
        run.log({"step": 2, "loss": 1.5})
        run.log({"step": 2, "eval/a": 0.7, "eval/a/low": 0.6, "eval/a/high": 0.8})
        run.update(status="completed")
        return run

    monkeypatch.setitem(sys.modules, "statewise.training.loop", SimpleNamespace(train=train))  # type: ignore[arg-type]
    return calls


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def train(recipe: Any, target: Path, **options: Any) -> None:
        raise error

    monkeypatch.setitem(sys.modules, "statewise.training.loop", SimpleNamespace(train=train))  # type: ignore[arg-type]


def test_train(cli: Callable[..., Any], loop: list[Any], recipe_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = cli("train", recipe_file, "optim.lr=0.5", "--seed", "3", "--out", out, "--track", "tensorboard")
    assert done.code == 0
    (call,) = loop
    assert call["recipe"].optim.lr == 0.5 and call["recipe"].seed == 3 and call["target"] == out
    assert (call["resume"], call["quiet"], call["track"]) == (False, False, ["tensorboard"])
    assert done.err.splitlines()[0].startswith("statewise 0") and f"words ({call['recipe'].hash}) -> {out}" in done.err
    assert "completed at step 2" in done.out and re.search(r"loss +1\.5$", done.out, re.MULTILINE)
    assert "0.500 [0.400, 0.600]" in done.out and "0.700 [0.600, 0.800]" in done.out


def test_json_is_all_of_stdout(cli: Callable[..., Any], loop: list[Any], recipe_file: Path, tmp_path: Path) -> None:
    done = cli("train", recipe_file, "--out", tmp_path / "run", "--json", "--quiet")
    plain = json.loads(done.out)
    assert done.err == "" and loop[0]["quiet"]
    assert plain["status"] == "completed" and plain["step"] == 2 and plain["last"] == {"step": 2, "loss": 1.5}
    assert plain["evals"]["2"]["a"] == {"mean": 0.7, "low": 0.6, "high": 0.8}


def test_default_directory(
    cli: Callable[..., Any], loop: list[Any], recipe_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("train", recipe_file).code == 0
    assert loop[0]["target"] == Path("runs") / f"words-{loop[0]['recipe'].hash}"


def test_other_ranks_are_silent(
    cli: Callable[..., Any], loop: list[Any], recipe_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "1")
    done = cli("train", recipe_file, "--out", tmp_path / "run", "--json")
    assert (done.code, done.out, done.err) == (0, "", "")


def test_resume(cli: Callable[..., Any], loop: list[Any], recipe_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    cli("train", recipe_file, "--out", run)
    assert cli("train", "--resume", run).code == 0
    assert loop[1]["resume"] and loop[1]["target"] == run and loop[1]["recipe"].hash == loop[0]["recipe"].hash
    assert cli("train", "--resume", run, "budget.max_steps=20").code == 0
    assert loop[2]["recipe"].budget.max_steps == 20
    assert RunDir.open(run).recipe_hash == loop[2]["recipe"].hash
    refused = cli("train", "--resume", run, "optim.lr=1")
    assert refused.code == 2 and "only budget.* may change" in refused.err and len(loop) == 3
    both = cli("train", recipe_file, "--resume", run)
    assert both.code == 2 and "leave RECIPE and --out away" in both.err
    nothing = cli("train", "--resume", tmp_path / "none")
    assert nothing.code == 2 and "is no run directory" in nothing.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("data.jsonl:3: field 'prompt' is missing"), 2),
        (NonFiniteLoss("the loss is nan"), 1),
        (Interrupted("stopped at step 4 with a checkpoint"), 3),
        (StatewiseError("plain"), 2),
        (OSError(28, "No space left on device"), 2),
        (RuntimeError("surprise"), 70),
    ],
)
def test_exit_codes(
    cli: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    recipe_file: Path,
    tmp_path: Path,
    error: Exception,
    code: int,
) -> None:
    failing(monkeypatch, error)
    done = cli("train", recipe_file, "--out", tmp_path / "run", "--quiet")
    assert done.code == code and done.out == ""
    said = error.strerror + "; free some space" if isinstance(error, OSError) else str(error)
    assert said in done.err and "Traceback" not in done.err


def test_debug_shows_the_error(monkeypatch: pytest.MonkeyPatch, recipe_file: Path, tmp_path: Path) -> None:
    from statewise.cli import main

    failing(monkeypatch, DataError("x"))
    words = ["train", str(recipe_file), "--out", str(tmp_path / "run"), "--quiet"]
    with pytest.raises(DataError):
        main([*words, "--debug"])
    monkeypatch.setenv("STATEWISE_DEBUG", "1")
    with pytest.raises(DataError):
        main(words)


def test_ctrl_c_before_the_loop(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, recipe_file: Path, tmp_path: Path
) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    done = cli("train", recipe_file, "--out", tmp_path / "run")
    assert done.code == 3 and "nothing had been written" in done.err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    done = cli("train", recipe_file, "--out", tmp_path / "run")
    assert done.code == 3 and f"statewise train --resume {tmp_path / 'run'}" in done.err


def test_no_recipe(cli: Callable[..., Any], tmp_path: Path) -> None:
    done = cli("train")
    assert done.code == 2 and "no recipe is named" in done.err
    done = cli("train", tmp_path / "none.toml")
    assert done.code == 2 and "neither a file nor a shipped recipe" in done.err


def test_dry_run_writes_nothing(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, recipe_file: Path, tmp_path: Path, loop: list[Any]
) -> None:
    from dataclasses import dataclass

    @dataclass
    class Planned:
        preview: str = "one sample"
        weights_bytes: int = 7

        def words(self) -> list[str]:
            return ["memory: about 7 bytes"]

    plan = SimpleNamespace(plan=lambda recipe: Planned())
    monkeypatch.setitem(sys.modules, "statewise.training.plan", plan)  # type: ignore[arg-type]
    before = sorted(tmp_path.rglob("*.toml"))
    done = cli("train", recipe_file, "--dry-run", "--out", tmp_path / "run")
    assert done.code == 0 and loop == [] and sorted(tmp_path.rglob("*.toml")) == before
    for part in ("loss 1:", "number of selected tokens", "memory: about 7 bytes", "max_steps = 10", "one sample"):
        assert part in done.out
    plain = json.loads(cli("train", recipe_file, "--dry-run", "--json").out)
    assert plain["plan"]["weights_bytes"] == 7 and plain["recipe"]["budget"] == {"max_steps": 10}
