"""The smaller commands, and what all commands share."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import statewise
from statewise.recipe import Recipe
from statewise.run import RunDir
from statewise.training import checkpoint

WEIGHT = '''
from statewise.component import Weight

class Half(Weight, kind="half_for_cli_tests"):
    """A constant."""
    needs = ("logprobs",)

    def __call__(self, stats, batch):
        return stats.logprobs * 0 + {value}
'''


def test_version_and_module() -> None:
    command = [sys.executable, "-m", "statewise", "--version"]
    assert subprocess.check_output(command, text=True) == f"statewise {statewise.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'"),
        (["eval", "tiny", "--sed", "3"], "--sed"),
        (["eval"], "expected one model"),
        (["eval", "tiny", "--model", "tiny", "--task", "tiny:facts"], "expected one model"),
        (["eval", "--model", "tiny", "--tasks", "tiny:facts"], "named by --task tiny:facts"),
        (["runs", "lst"], "Did you mean 'list'"),
        (["eval", "tiny", "--limit", "0", "--task", "x"], "limit"),
    ],
)
def test_usage_errors(cli: Callable[..., Any], words: list[str], message: str) -> None:
    done = cli(*words)
    assert done.code == 2 and message in done.err and done.out == ""


def test_recipe_show_and_check(cli: Callable[..., Any], recipe_file: Path) -> None:
    shown = cli("recipe", "show", recipe_file, "optim.lr=0.25")
    assert shown.code == 0 and "# states:" in shown.out and "lr = 0.25" in shown.out
    written = recipe_file.with_name("again.toml")
    written.write_text(shown.out)
    assert Recipe.load(written).hash == Recipe.load(recipe_file, ["optim.lr=0.25"]).hash
    plain = json.loads(cli("recipe", "show", recipe_file, "--json").out)
    assert plain["name"] == "words" and Recipe.load(recipe_file).hash == plain["hash"]
    assert Recipe.from_plain(plain["recipe"], base_dir=recipe_file.parent).hash == plain["hash"]
    assert cli("recipe", "check", recipe_file).out.startswith("words: valid")
    assert json.loads(cli("recipe", "check", recipe_file, "--json").out)["valid"] is True
    wrong = cli("recipe", "check", recipe_file, "--optim.lrr", "1")
    assert wrong.code == 2 and "did you mean 'lr'" in wrong.err


def test_recipe_list(cli: Callable[..., Any]) -> None:
    listed = json.loads(cli("recipe", "list", "--json").out)
    text = cli("recipe", "list").out
    for entry in listed:
        assert entry["name"] in text and entry["about"].endswith(".") and len(entry["about"]) > 30
        assert cli("recipe", "check", entry["name"]).code == 0


def test_show_prints_the_metrics_that_matter_one_under_the_other(cli: Callable[..., Any], recipe_file: Path) -> None:
    run = RunDir.create(recipe_file.parent / "run", Recipe.load(recipe_file))
    row = {"step": 1, "ratio_p99": 1.5, "reward": 0.25, "loss": -0.0, "tokens": 90, "total_tokens": 8191, "lr": 1e-4}
    run.log({**row, "grad_norm": None, "step_seconds": 5.558})
    lines = cli("runs", "show", run.path).out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("last step: "))
    assert lines[first : first + 7] == [
        "last step: loss                   0",
        "           mean reward            0.25",
        "           learning rate          0.0001",
        "           trained tokens         90",
        "           trained tokens in all  8,191",
        "           seconds                5.558",
        "saved:     no checkpoint",
    ]
    assert json.loads(cli("runs", "show", run.path, "--json").out)["last"]["ratio_p99"] == 1.5


def test_runs(cli: Callable[..., Any], recipe_file: Path, tmp_path: Path) -> None:
    recipe = Recipe.load(recipe_file)
    for name, status in (("first", "completed"), ("second", "failed")):
        run = RunDir.create(tmp_path / "runs" / name, recipe)
        run.log({"step": 4, "loss": 0.25})
        run.update(status=status, error="DataError: nothing" if status == "failed" else None)
    checkpoint.save(run.path, 4, write=lambda path: None, state={})
    listed = json.loads(cli("runs", "list", tmp_path / "runs", "--json").out)
    assert {Path(r["run"]).name: r["status"] for r in listed} == {"first": "completed", "second": "failed"}
    table = cli("runs", "list", tmp_path / "runs").out
    assert "completed" in table and "failed" in table and "0.25" in table
    shown = cli("runs", "show", run.path).out
    for part in ("failed at step 4", "DataError: nothing", "last step: loss  0.25", "saved:     step 4", "states:"):
        assert part in shown
    assert json.loads(cli("runs", "show", run.path, "--json").out)["checkpoints"] == [4]
    assert cli("runs", "show", tmp_path).code == 2
    assert json.loads(cli("runs", "list", tmp_path / "nowhere", "--json").out) == []
    (run.path / "run.json").write_text("{")
    table = cli("runs", "list", tmp_path / "runs").out
    assert "completed" in table and "unreadable" in table


def test_check(cli: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "half.py"
    file.write_text(WEIGHT.format(value="0.5"))
    good = cli("check", file)
    assert good.code == 0 and "weight half_for_cli_tests" in good.out and "FAIL" not in good.out
    file.write_text(WEIGHT.format(value="(-0.5)").replace("half_for", "negative_for").replace("Half", "Negative"))
    bad = cli("check", file, "--json")
    assert bad.code == 1 and "checks failed" in bad.err
    checks = json.loads(bad.out)["weight negative_for_cli_tests"]
    assert [c["name"] for c in checks if not c["passed"]]
    file.write_text(WEIGHT.format(value="stats.gone").replace("half_for", "gone_for").replace("Half", "Gone"))
    raised = cli("check", file).out
    assert raised.count("has no attribute 'gone'") == 1 and f"({file}:" in raised and "as above" in raised
    file.write_text("x = 1")
    assert cli("check", file).code == 2
    assert "no file" in cli("check", tmp_path / "none.py").err


@dataclass
class Score:
    name: str
    metric: str = "accuracy"
    n: int = 10
    mean: float = 0.5
    se: float = 0.1
    low: float = 0.3
    high: float = 0.7

    def summary(self) -> dict[str, Any]:
        return vars(self)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Loading and evaluating replaced; keeps what it was asked for."""
    calls: list[dict[str, Any]] = []

    def load_policy(settings: Any, *, device: str | None) -> str:
        calls.append({"settings": settings, "device": device})
        return "policy"

    def run(policy: Any, tasks: list[Any], **options: Any) -> dict[str, Score]:
        calls.append({"policy": policy, "tasks": tasks, **options})
        return {t.kind: Score(t.kind) for t in tasks}

    for name, module in (
        ("statewise.models.load", SimpleNamespace(load_policy=load_policy)),
        ("statewise.evals", SimpleNamespace(run=run)),
    ):
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
        monkeypatch.setattr(statewise, "evals", SimpleNamespace(run=run), raising=False)
    return calls


def test_eval(cli: Callable[..., Any], engine: list[dict[str, Any]], tmp_path: Path) -> None:
    plugin = tmp_path / "ask.py"
    plugin.write_text(
        "from statewise.component import Task\n"
        "class Ask(Task, kind='ask_for_cli_tests'):\n    level: int = 1\n    def run(self, context): return []\n"
    )
    words = ("eval", "some/model", "--plugin", plugin, "--task", "ask_for_cli_tests:level=3", "--limit", 5, "--seed", 9)
    done = cli(*words, "--adapter", "an/adapter", "--device", "cpu", "--out", tmp_path / "out")
    assert done.code == 0 and "0.500 [0.300, 0.700]" in done.out
    loaded, evaluated = engine
    assert loaded["settings"].path == "some/model" and loaded["settings"].adapter.path == "an/adapter"
    assert loaded["device"] == "cpu" and evaluated["policy"] == "policy" and evaluated["tasks"][0].level == 3
    assert (evaluated["limit"], evaluated["seed"], evaluated["out"]) == (5, 9, tmp_path / "out")
    plain = json.loads(cli(*words, "--json").out)
    assert plain["ask_for_cli_tests"]["mean"] == 0.5 and plain["ask_for_cli_tests"]["n"] == 10
    assert "no task is named" in cli("eval", "some/model").err


def test_eval_of_a_run(
    cli: Callable[..., Any], engine: list[dict[str, Any]], recipe_file: Path, tmp_path: Path
) -> None:
    """The last valid checkpoint; a damaged one is named on stderr."""
    plugin = tmp_path / "asked.py"
    plugin.write_text(
        "from statewise.component import Task\n"
        "class Asked(Task, kind='asked_for_cli_tests'):\n    def run(self, context): return []\n"
    )
    run = RunDir.create(tmp_path / "run", Recipe.load(recipe_file))
    words = ("eval", run.path, "--plugin", plugin, "--task", "asked_for_cli_tests", "--json")
    assert "has no valid checkpoint" in cli(*words).err
    for step in (3, 6):
        checkpoint.save(run.path, step, write=lambda path: None, state={})
    (run.path / "checkpoints" / "step_000006" / "trainer.json").write_text("damaged")
    done = cli(*words)
    assert json.loads(done.out) and "checkpoint of step 6 can't be used" in done.err
    assert engine[0]["settings"].path == str(run.path / "checkpoints" / "step_000003")


def test_eval_of_a_run_takes_its_recipe_s_tasks(
    cli: Callable[..., Any], engine: list[dict[str, Any]], recipe_file: Path, tmp_path: Path
) -> None:
    recipe = Recipe.load(recipe_file, ['eval.tasks=["tiny:facts"]'])
    run = RunDir.create(tmp_path / "run", recipe)
    checkpoint.save(run.path, 3, write=lambda path: None, state={})
    cli("eval", run.path, "--json")
    assert engine[1]["tasks"] == recipe.eval.tasks and engine[1]["base_dir"] == recipe.base_dir.resolve()
    untasked = RunDir.create(tmp_path / "untasked", Recipe.load(recipe_file, ["eval.tasks=[]"]))
    assert "no task is named" in cli("eval", untasked.path).err


def test_tiny_build(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def build(out: Path, seed: int, progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        progress({"step": 10, "loss": 2.5})
        return {"scores": {"math": 0.4}, "seed": seed, "out": str(out)}

    monkeypatch.setitem(sys.modules, "statewise.tiny.build", SimpleNamespace(build=build))  # type: ignore[arg-type]
    done = cli("tiny", "build", "--out", tmp_path, "--seed", "4")
    assert done.code == 0 and "math: 0.4" in done.out and "step=10 loss=2.5" in done.err
    assert json.loads(cli("tiny", "build", "--out", tmp_path, "--json").out)["seed"] == 0
    assert cli("tiny", "build").code == 2


def test_what_is_no_number_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    from statewise.cli.output import interval, print_table

    nan = float("nan")
    assert interval({"mean": nan, "low": nan, "high": nan}) == "-"
    assert interval({"mean": 0.5, "low": nan, "high": nan}) == "0.500"
    print_table(["a", "b"], [[nan, 1.5]])
    assert capsys.readouterr().out.splitlines()[1].split() == ["-", "1.5"]
