"""A run directory is whole whatever happens, has one writer, and reads back what was written."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from statewise.errors import RunError
from statewise.recipe import Recipe
from statewise.run import RunDir, steps_in

HOLDER = """
import sys, time
from statewise.run import RunDir
with RunDir(sys.argv[1]).lock():
    print("held", flush=True)
    time.sleep(60)
"""


def hold(path: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def run(tmp_path: Path, recipe: Recipe) -> RunDir:
    return RunDir.create(tmp_path / "a" / "run", recipe)


def test_create_and_open(run: RunDir, recipe: Recipe) -> None:
    opened = RunDir.open(run.path)
    info = opened.info
    assert opened.status == "created" and opened.recipe_hash == recipe.hash
    assert info["seed"] == 7 and info["recipe"] == "words" and info["method"] == recipe.explain()
    assert (
        info["versions"]["torch"] == torch.__version__.split("+")[0] or info["versions"]["torch"] == torch.__version__
    )
    assert info["hardware"]["cores"] >= 1 and info["hardware"]["torch_threads"] == torch.get_num_threads()
    assert sorted(p.name for p in run.path.iterdir()) == [
        "checkpoints", "diagnostics", "evals", "recipe.toml", "rollouts", "run.json"
    ]  # fmt: skip


def test_repr_says_directory_recipe_steps_and_state(run: RunDir) -> None:
    run.log({"step": 3, "loss": 0.5})
    run.update(status="completed")
    assert repr(run) == f"RunDir({str(run.path)!r}: words, 3 steps, completed)"
    assert repr(RunDir(run.path / "none")) == f"RunDir({str(run.path / 'none')!r}: unreadable)"


def test_recipe_comes_back_with_its_name_and_base_directory(run: RunDir, recipe: Recipe) -> None:
    again = RunDir.open(run.path).recipe()
    assert again.hash == recipe.hash and again.name == "words"
    assert again.base_dir == Path.cwd()  # where "data.jsonl" is, not the run directory
    longer = run.recipe(["budget.max_steps=20"])
    run.replace_recipe(longer)
    assert run.recipe_hash == longer.hash != recipe.hash and run.recipe().budget.max_steps == 20
    assert [former["recipe_hash"] for former in run.info["former_recipes"]] == [recipe.hash]


def test_occupied_directories_are_refused(run: RunDir, recipe: Recipe, tmp_path: Path) -> None:
    before = (run.path / "run.json").read_bytes()
    with pytest.raises(RunError, match="holds a run .status created.. Continue it with --resume"):
        RunDir.create(run.path, recipe)
    assert (run.path / "run.json").read_bytes() == before
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(RunError, match=r"is not empty .it holds cat\.jpg. and is no run"):
        RunDir.create(tmp_path / "photos", recipe)
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="can't be made a run directory"):
        RunDir.create(tmp_path / "file", recipe)
    (tmp_path / "empty").mkdir()
    assert RunDir.create(tmp_path / "empty", recipe).status == "created"


def test_what_is_no_run(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is no run directory: it has no run\.json"):
        RunDir.open(tmp_path)
    (run.path / "run.json").write_text('{"schema": 99}')
    with pytest.raises(RunError, match="schema is 99"):
        RunDir.open(run.path)
    (run.path / "run.json").write_text("{")
    with pytest.raises(RunError, match=r"run\.json: can't be read"):
        RunDir.open(run.path)


def test_status_and_times(run: RunDir) -> None:
    with run.lock():
        run.update(status="running")
        assert run.status == "running" and run.info["started"] and run.info["ended"] is None
        run.update(status="failed", error="DataError: x")
    assert run.status == "failed" and run.info["ended"] and run.info["error"] == "DataError: x"
    with pytest.raises(ValueError, match="status is 'done'"):
        run.update(status="done")


def test_a_second_process_is_refused_by_name(run: RunDir) -> None:
    process = hold(run.path)
    try:
        run.update(status="running")
        assert run.is_locked() and run.status == "running"
        with pytest.raises(RunError, match=f"in use by process {process.pid} on "), run.lock():
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not run.is_locked() and run.status == "interrupted"  # killed: run.json still says running
    with run.lock():
        assert run.is_locked()
    assert not run.is_locked()


def test_the_lock_holds_within_a_process_and_ends_with_an_error(run: RunDir) -> None:
    with pytest.raises(ZeroDivisionError), run.lock():
        with pytest.raises(RunError, match=f"process {os.getpid()} "), RunDir.open(run.path).lock():
            pass
        raise ZeroDivisionError
    with run.lock():
        pass


def test_metrics(run: RunDir) -> None:
    assert run.metrics() == []
    run.log({"step": 1, "loss": torch.tensor(0.5), "bad": math.nan, "worse": -math.inf, "text": "é"})
    run.log({"step": 2, "path": Path("x"), "many": (1, 2)})
    expected = [
        {"step": 1, "loss": 0.5, "bad": None, "worse": None, "text": "é"},
        {"step": 2, "path": "x", "many": [1, 2]},
    ]
    assert run.metrics() == expected
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert run.metrics() == expected  # a torn last row
    run.truncate(1)
    assert run.metrics() == expected[:1]
    run.log({"step": 2})
    assert [row["step"] for row in run.metrics()] == [1, 2]
    (run.path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl:2: is not a row of metrics.*remove the line"):
        run.metrics()


def test_rows_that_a_crash_cut(run: RunDir) -> None:
    """A last row is left out, with a line's end behind it or without; a resumed run removes those further up, and says so."""
    file = run.path / "metrics.jsonl"
    for torn in ('{"step": 2, "lo\n', "\0\0\0\0", '{"step": 2}\n7\n\n'):
        file.write_text('{"step": 1}\n' + torn)
        assert [row["step"] for row in run.metrics()] in ([1], [1, 2])
        assert run.truncate(1) == 0 and file.read_text() == '{"step": 1}\n'
    file.write_text('{"step": 1}\n{"ste\n{"step": 3}\n\0\0\n{"step": 4}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl:2: "):
        run.metrics()
    assert run.truncate(3) == 1 and [row["step"] for row in run.metrics()] == [1, 3]


def test_truncate_forgets_later_evaluations(run: RunDir) -> None:
    for step in (0, 10, 20):
        run.eval_dir(step).mkdir()
        run.log({"step": step, "eval/tiny:math": 0.1 * step})
    (run.path / "evals" / "notes").mkdir()
    run.truncate(10)
    assert list(steps_in(run.path / "evals")) == [0, 10] == [row["step"] for row in run.metrics()]
    run.truncate(-1)
    assert run.metrics() == [] and [p.name for p in (run.path / "evals").iterdir()] == ["notes"]


def test_evals(run: RunDir) -> None:
    run.log({"step": 0, "eval/a": 0.5, "eval/a/low": 0.4, "eval/a/high": 0.6, "eval/b/low": 0.1})
    run.log({"step": 1, "loss": 2.0})
    run.log({"step": 5, "eval/a": 0.7, "eval/a/low": 0.6, "eval/a/high": 0.8})
    assert run.evals() == {
        0: {"a": {"mean": 0.5, "low": 0.4, "high": 0.6}, "b/low": {"mean": 0.1}},
        5: {"a": {"mean": 0.7, "low": 0.6, "high": 0.8}},
    }


def test_record_once(run: RunDir) -> None:
    for _ in range(2):  # a resumed run reads the same data again
        run.record({"path": Path("data.jsonl"), "rows": 10, "dropped": 1})
    run.record({"path": "other.jsonl", "rows": 3})
    expected = [{"path": "data.jsonl", "rows": 10, "dropped": 1}, {"path": "other.jsonl", "rows": 3}]
    run.data_are_settled = True
    run.record({"path": "other.jsonl", "rows": 3, "digest": "of a later version"})
    assert run.info["data"] == expected
    with pytest.raises(RunError, match="other samples than when the run began"):
        run.record({"path": "other.jsonl", "rows": 4})


def test_updates_are_never_seen_half(run: RunDir) -> None:
    """A reader in another process finds a whole run.json at every moment of many updates."""
    reader = (
        "import json, sys, time\nend = time.time() + 1.0\ncount = 0\n"
        "while time.time() < end:\n    json.load(open(sys.argv[1])); count += 1\nprint(count)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", reader, str(run.path / "run.json")], stdout=subprocess.PIPE, text=True
    )
    end = time.time() + 1.2
    while time.time() < end:
        run.update(filler="x" * 20_000)
    out, _ = process.communicate()
    assert process.returncode == 0 and int(out) > 10
    assert not [p for p in run.path.iterdir() if p.name.endswith(".tmp")]


def test_run_json_is_strict_json(run: RunDir) -> None:
    run.update(spent={"seconds": math.inf})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads((run.path / "run.json").read_text(), parse_constant=refuse)["spent"] == {"seconds": None}
