"""The registered kinds of every role; built-in ones are imported when their role is first asked for."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from statewise.errors import RecipeError, nearest

REGISTRY: dict[str, dict[str, type[Any]]] = {}
# Where the built-in kinds of a role live: imported when a kind of the role is first looked up.
BUILTIN = {
    "source": "statewise.sources",
    "signal": "statewise.signals",
    "loss": "statewise.losses",
    "weight": "statewise.weights",
    "selector": "statewise.selectors",
    "verifier": "statewise.signals.verifiers",
    "task": "statewise.evals.tasks",
    "diagnostic": "statewise.diagnostics",
}


def register(cls: type[Any]) -> None:
    """Put a component class under its role and kind. Raises RecipeError where another has the kind."""
    if not cls.role:
        raise TypeError(f"{cls.__name__} has kind={cls.kind!r} but no role: subclass Loss, Weight, Source, ...")
    kinds = REGISTRY.setdefault(cls.role, {})
    known = kinds.get(cls.kind)
    same = known is not None and (known.__qualname__, _file_of(known)) == (cls.__qualname__, _file_of(cls))
    if known is not None and not same:
        raise RecipeError(
            f"{cls.role} kind '{cls.kind}' is registered twice: by {known.__module__}.{known.__qualname__} and by "
            f"{cls.__module__}.{cls.__qualname__}; choose another kind for the second."
        )
    kinds[cls.kind] = cls


def _file_of(cls: type) -> str:
    module = sys.modules.get(cls.__module__)
    return getattr(module, "__file__", None) or cls.__module__


def kinds(role: str) -> dict[str, type[Any]]:
    """All registered kinds of a role, built-in ones included."""
    if role in BUILTIN:
        importlib.import_module(BUILTIN[role])
    if role not in REGISTRY:
        raise RecipeError(f"unknown component role '{role}'{nearest(role, REGISTRY)}")
    return REGISTRY[role]
