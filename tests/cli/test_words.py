"""Recipes, overrides and tasks on the command line."""

from pathlib import Path
from typing import Any

import pytest

from statewise.cli.words import parse_task, read_tasks, split_settings, split_words
from statewise.component import Task
from statewise.errors import RecipeError


class Sums(Task, kind="cli:sums"):
    data: str = ""
    limit: int | None = None

    def run(self, context: Any) -> list[dict[str, Any]]:
        return []


class Longer(Task, kind="cli:sums:hard"):
    def run(self, context: Any) -> list[dict[str, Any]]:
        return []


@pytest.mark.parametrize(
    ("words", "recipe", "overrides"),
    [
        (["a.toml"], "a.toml", []),
        ([], None, []),
        (["a.toml", "optim.lr=1e-4", "seed=3"], "a.toml", ["optim.lr=1e-4", "seed=3"]),
        (["--optim.lr", "1e-4", "a.toml", "--seed=3"], "a.toml", ["optim.lr=1e-4", "seed=3"]),
        (["a.toml", "--optim.momentum", "-1"], "a.toml", ["optim.momentum=-1"]),
        (["model.path=x=y", "a"], "a", ["model.path=x=y"]),
    ],
)
def test_split_words(words: list[str], recipe: str | None, overrides: list[str]) -> None:
    assert split_words(words) == (recipe, overrides)


def test_a_recipe_file_with_an_equals_sign(tmp_path: Path) -> None:
    file = tmp_path / "lr=3.toml"
    file.touch()
    assert split_words([str(file)]) == (str(file), [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b"], "received the recipes 'a' and 'b', expected one"),
        (["a", "--optim.lr"], "--optim.lr: has no value"),
        (["a", "--ouput", "x"], "unknown option '--ouput'; did you mean '--out'"),
        (["a", "--optin.lr=3"], "unknown option '--optin.lr'; did you mean '--optim'"),
        (["a", "-x"], "unknown option '-x'"),
    ],
)
def test_wrong_words(words: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        split_words(words, ("--out", "--resume"))


def test_split_settings() -> None:
    assert split_settings("limit=10,data=a,b.jsonl,flag=true,name='x'") == {
        "limit": 10,
        "data": "a,b.jsonl",
        "flag": True,
        "name": "x",
    }
    with pytest.raises(RecipeError, match="received 'limit', expected key=value"):
        split_settings("limit")


def test_tasks() -> None:
    assert parse_task("cli:sums") == Sums()
    assert parse_task("cli:sums:hard") == Longer()
    assert parse_task("cli:sums:limit=3,data=/a:b.jsonl") == Sums(limit=3, data="/a:b.jsonl")
    assert split_settings("data=a.jsonl,columns.answer=gold,columns.prompt=q,limit=3") == {
        "data": "a.jsonl",
        "columns": {"answer": "gold", "prompt": "q"},
        "limit": 3,
    }
    with pytest.raises(RecipeError, match="received 'columns.answer=gold', expected key=value"):
        split_settings("columns=q,columns.answer=gold")
    with pytest.raises(RecipeError, match="unknown task 'cli:sum'; did you mean 'cli:sums'"):
        parse_task("cli:sum:limit=3")
    with pytest.raises(RecipeError, match="unknown key; did you mean 'limit'"):
        parse_task("cli:sums:limt=3")


def test_task_file(tmp_path: Path) -> None:
    file = tmp_path / "tasks.toml"
    file.write_text('tasks = ["cli:sums", { kind = "cli:sums", limit = 3 }]')
    assert read_tasks(file) == [Sums(), Sums(limit=3)]
    file.write_text('task = ["cli:sums"]')
    with pytest.raises(RecipeError, match=r"received the keys \['task'\], expected a list named tasks"):
        read_tasks(file)
    with pytest.raises(RecipeError, match="can't be read"):
        read_tasks(tmp_path / "missing.toml")
