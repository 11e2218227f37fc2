"""Overrides such as `optim.lr=1e-4`, and writing TOML."""

from __future__ import annotations

import copy
import json
import math
import tomllib
from collections.abc import Sequence
from typing import Any

from statewise.errors import RecipeError
from statewise.foreign import hint

# Settings of embedded data alone, and how its names begin.
MADE = {"count": "tiny:", "seed": "tiny:", "steps": "tiny:math", "style": "tiny:math"}

COMPONENTS = ("loss", "weight", "on", "verifier")  # fields that a kind alone is short for


def apply_overrides(plain: dict[str, Any], overrides: Sequence[str], known: Sequence[str]) -> dict[str, Any]:
    """A copy of `plain` with `a.b.0.c=value` set; values are TOML, and anything that is not TOML is a string.

    Raises RecipeError for an override without `=`, an unknown first key, or a path through something that is no table.
    """
    plain = copy.deepcopy(plain)
    for override in overrides:
        path, sign, text = override.removeprefix("--").partition("=")
        if not sign or not path:
            raise RecipeError(f"override '{override}': expected key=value, such as optim.lr=1e-4.")
        keys = path.strip().split(".")
        if keys[0] not in known:
            raise RecipeError(f"override '{override}': unknown key '{keys[0]}'{hint(keys[0], known)}")
        _set(plain, keys, parse_value(text), override)
    _without_made(plain.get("source"), [o.removeprefix("--").partition("=")[0].strip() for o in overrides])
    return plain


def _without_made(source: Any, keys: Sequence[str]) -> None:
    """With data of the user's own in place of embedded data, what only that has goes too, unless it was asked for."""
    if not isinstance(source, dict) or "source.data" not in keys or str(source["data"]).startswith("tiny:"):
        return
    for name in MADE:
        if f"source.{name}" not in keys:
            source.pop(name, None)


def parse_value(text: str) -> Any:
    """A value as TOML, `none` as None, and anything that is neither as text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return None if text.strip() in ("none", "null") else text


def _set(node: Any, keys: list[str], value: Any, override: str) -> None:
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                raise RecipeError(f"override '{override}': '{key}' is no index of a list of {len(node)}.")
            index: Any = int(key)
        elif isinstance(node, dict):
            index = key
        else:
            raise RecipeError(f"override '{override}': '{'.'.join(keys[:depth])}' is {node!r}, not a table.")
        if last:
            node[index] = value
            return
        if isinstance(node, dict):
            node.setdefault(index, {})
        if isinstance(node[index], str) and (isinstance(node, list) or depth == 0 or key in COMPONENTS):
            # source = "dataset" is short for source = { kind = "dataset" }, a term "nll" for { loss = "nll" }
            node[index] = {"loss" if keys[:depth] == ["objective"] else "kind": node[index]}
        node = node[index]


def to_toml(plain: dict[str, Any]) -> str:
    """TOML text of nested dicts: scalars first, then tables; lists of tables inside lists are written inline."""
    lines: list[str] = []
    _table(plain, (), lines)
    return "\n".join(lines).strip() + "\n"


def _table(table: dict[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    inner = {k: v for k, v in table.items() if isinstance(v, dict) and v}
    lines += [f"{_key(k)} = {_inline(v)}" for k, v in table.items() if k not in inner]
    for key, value in inner.items():
        lines += ["", f"[{'.'.join(_key(k) for k in (*path, key))}]"]
        _table(value, (*path, key), lines)


def _key(key: str) -> str:
    plain = key.replace("_", "").replace("-", "").isalnum() and key.isascii()
    return key if plain else json.dumps(key)


def _inline(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float):
        if not math.isfinite(value):
            return {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
        return repr(value)
    if isinstance(value, int):
        return repr(value)
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(k)} = {_inline(v)}" for k, v in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_inline(v) for v in value) + "]"
    raise RecipeError(f"can't write {value!r} ({type(value).__name__}) as TOML.")
