"""Missing data, verifiers and columns are told before a model is loaded and before a run directory is made."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import cli  # noqa: F401 - a fixture

from statewise import evals, train
from statewise.errors import DataError, RecipeError
from statewise.recipe import Recipe
from statewise.training import loop
from statewise.training.ready import check_files, check_verifiers

ASK = {"kind": "generative", "name": "ask", "data": "ask.jsonl", "max_new_tokens": 4}
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no file": ({"data": "gone.jsonl"}, r"eval.tasks\[0\]: data: no file or directory 'gone.jsonl'"),
    "no directory": ({"data": "./gone"}, r"eval.tasks\[0\]: data: no file or directory './gone'"),
    "no row": ({"data": "empty.jsonl"}, r"eval.tasks\[0\]: empty.jsonl: holds no rows"),
    "no JSON": ({"data": "torn.jsonl"}, r"eval.tasks\[0\]: .*torn.jsonl:1: "),
    "no answer": ({"data": "texts.jsonl"}, r"eval.tasks\[0\]: .*texts.jsonl:1: no 'answer'"),
    "no column": ({"columns": {"prompt": "question"}}, r"ask.jsonl:1: no column 'question'"),
    "no prompt": ({"template": "{asked}"}, r"ask.jsonl:1: task 'generative': the template .* no column 'asked'"),
    "no choices": ({"kind": "choice", "max_new_tokens": None}, r"ask.jsonl:1: choices: received None"),
    "no verifier": ({"verifier": "oops.py:score"}, r"eval.tasks\[0\].verifier: no file 'oops.py'; looked in"),
    "no function": (
        {"verifier": "judge.py:nope"},
        r"eval.tasks\[0\].verifier: .*'judge.py' defines no function 'nope'",
    ),
}
UNRESOLVED = ("no verifier", "no function")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "ask.jsonl").write_text('{"prompt": "Is it 1?", "answer": "1"}\n' * 2)
    (tmp_path / "texts.jsonl").write_text('{"text": "It is 1."}\n')
    (tmp_path / "torn.jsonl").write_text('{"prompt": "Is it\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "judge.py").write_text("def score(text, example):\n    return 1.0\n")
    return tmp_path


def made(plain: dict[str, Any], base: Path, **task: Any) -> Recipe:
    asked = {name: value for name, value in {**ASK, **task}.items() if value is not None}
    return Recipe.from_plain({**plain, "eval": {"tasks": [asked]}, "budget": {"max_steps": 1}}, base_dir=base)


@pytest.mark.parametrize("name", FAULTS)
def test_a_task_that_can_not_begin(
    name: str, plain: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, message = FAULTS[name]
    recipe = made(plain, base, **change)
    monkeypatch.setattr(loop, "open_accelerator", lambda: pytest.fail("went on to load"))
    with pytest.raises((RecipeError, DataError), match=message):
        train(recipe, base / "run", quiet=True)
    assert not (base / "run").exists()
    with pytest.raises((RecipeError, DataError)):
        evals.run("no_such_model", recipe.eval.tasks, base_dir=base)
    if name in UNRESOLVED:
        with pytest.raises(RecipeError, match=message):
            check_verifiers(recipe)
    else:
        check_verifiers(recipe)


def test_a_source_that_can_not_begin(plain: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "open_accelerator", lambda: pytest.fail("went on to load"))
    parts = [{"name": "a", "source": {"kind": "dataset", "data": "gone.jsonl"}}, {"source": plain["source"]}]
    for source in ({"kind": "dataset", "data": "gone.jsonl"}, {"kind": "mixture", "parts": parts}):
        with pytest.raises(DataError, match="source: data: no file or directory 'gone.jsonl'"):
            train(Recipe.from_plain({**plain, "source": source}, base_dir=base), base / "run", quiet=True)
    assert not (base / "run").exists()
    reward = {
        "source": {"kind": "policy", "data": "ask.jsonl", "max_tokens": 4, "group_size": 2},
        "objective": ["clip"],
    }
    signal = [{"kind": "reward", "verifier": "judge.py:nope", "self_test": False}]
    recipe = Recipe.from_plain({**plain, **reward, "signal": signal}, base_dir=base)
    with pytest.raises(RecipeError, match=r"signal\[0\].verifier: .*defines no function 'nope'"):
        check_verifiers(recipe)


def test_what_is_there_or_on_the_hub_passes(plain: dict[str, Any], base: Path) -> None:
    check_files(made(plain, base, verifier="judge.py:score"))
    check_files(made(plain, base, data="someone/something"))


def test_two_tasks_of_one_name(plain: dict[str, Any], base: Path) -> None:
    recipe = Recipe.from_plain({**plain, "eval": {"tasks": [ASK, ASK]}}, base_dir=base)
    with pytest.raises(RecipeError, match="eval: tasks: two are called 'ask'"):
        check_files(recipe)


@pytest.mark.parametrize("name", FAULTS)
def test_the_commands_say_so(name: str, plain: dict[str, Any], base: Path, cli: Callable[..., Any]) -> None:  # noqa: F811
    change, _ = FAULTS[name]
    recipe = made(plain, base, **change)
    (base / "small.toml").write_text(recipe.to_toml())
    assert cli("recipe", "check", base / "small.toml").code == (2 if name in UNRESOLVED else 0)
    assert cli("train", base / "small.toml", "--dry-run").code == 2
    if name in ("no file", "no function"):
        done = cli("doctor", base / "small.toml", "--json")
        found = {f["check"]: f["status"] for f in json.loads(done.out)["findings"]}
        assert done.code == 1 and found["evaluation"] == "failed" and found["memory"] == "ok"


def test_a_task_of_yours_need_not_check(plain: dict[str, Any], base: Path) -> None:
    from statewise.component import Task

    class Bare(Task, kind="ready:bare"):
        def run(self, context: Any) -> list[dict[str, Any]]:
            return [{"id": "0", "score": 1.0}]

    check_files(Recipe.from_plain({**plain, "eval": {"tasks": ["ready:bare"]}}))
