"""What stands on the command line beside options: recipes, overrides, tasks."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from statewise.component import Component, kinds, parse
from statewise.errors import RecipeError, nearest
from statewise.foreign import hint
from statewise.overrides import parse_value
from statewise.recipe import Recipe


def split_words(words: Sequence[str], options: Sequence[str] = ()) -> tuple[str | None, list[str]]:
    """The recipe (None where none is named) and the overrides as `key=value`.

    Overrides are `optim.lr=1e-4`, `--optim.lr=1e-4` or `--optim.lr 1e-4`. Raises RecipeError for a second recipe, and
    for an option that is neither one of `options` nor a recipe's key.
    """
    recipe: str | None = None
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, sign, _ = word.partition("=")
        if word.startswith("-"):
            _check_key(key, options)
            if not sign and not rest:
                raise RecipeError(f"{word}: has no value; expected {word} VALUE.")
            overrides.append(word[2:] if sign else f"{word[2:]}={rest.pop(0)}")
        elif sign and not Path(word).exists():
            overrides.append(word)
        elif recipe is None:
            recipe = word
        else:
            raise RecipeError(f"received the recipes '{recipe}' and '{word}', expected one; an override is key=value.")
    return recipe, overrides


def _check_key(option: str, options: Sequence[str]) -> None:
    fields = list(Recipe.model_fields)
    if option.startswith("--") and option[2:].split(".")[0] in fields:
        return
    raise RecipeError(f"unknown option '{option}'{hint(option, [*options, *(f'--{name}' for name in fields)])}")


def split_settings(text: str) -> dict[str, Any]:
    """`limit=100,data=a,b.jsonl` as {"limit": 100, "data": "a,b.jsonl"}, `columns.answer=gold` as {"columns": {"answer":
    "gold"}}; values are TOML, and what is not is text.
    """
    settings: dict[str, Any] = {}
    for part in re.split(r",(?=[\w.]+=)", text):
        key, sign, value = part.partition("=")
        *tables, last = key.split(".")
        inner = settings
        for name in tables:
            inner = inner.setdefault(name, {}) if isinstance(inner, dict) else inner
        if not sign or not all(name.isidentifier() for name in (*tables, last)) or not isinstance(inner, dict):
            raise RecipeError(f"task settings '{text}': received '{part}', expected key=value,key=value.")
        inner[last] = parse_value(value)
    return settings


def parse_task(text: str) -> Component:
    """A task from `kind` or `kind:key=value,key=value`; a kind may itself hold a colon (tiny:math)."""
    known = kinds("task")
    fitting = [kind for kind in known if text == kind or text.startswith(f"{kind}:")]
    if not fitting:
        kind = re.split(r":(?=[\w.]+=)", text)[0]
        raise RecipeError(f"--task {text}: unknown task '{kind}'{nearest(kind, known)}")
    kind = max(fitting, key=len)
    settings = split_settings(text[len(kind) + 1 :]) if text != kind else {}
    return parse("task", {"kind": kind, **settings}, f"--task {text}")


def read_tasks(file: Path) -> list[Component]:
    """The tasks of a TOML file with a list `tasks`, as a recipe's [eval] has it."""
    try:
        plain = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        hint = "" if file.suffix == ".toml" else f" A task itself is named by --task {file}."
        raise RecipeError(f"--tasks {file}: can't be read: {error}.{hint}") from None
    listed = plain.get("tasks")
    if not isinstance(listed, list) or set(plain) != {"tasks"}:
        raise RecipeError(f"--tasks {file}: received the keys {sorted(plain)}, expected a list named tasks.")
    return [parse("task", item, f"{file}: tasks[{index}]") for index, item in enumerate(listed)]
