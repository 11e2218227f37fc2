"""docs/recipe.md names every setting and every built-in component, with the default that the code has."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from statewise import registry, settings, teachers
from statewise.component import Component, kinds
from statewise.objective import Term
from statewise.overrides import to_toml
from statewise.recipe import Recipe
from statewise.sources.data import DataSource

PAGE = Path(__file__).parents[2] / "docs" / "recipe.md"
MODELS: dict[str, type[BaseModel]] = {
    "Recipe": Recipe,
    "model": settings.ModelSettings,
    "model.adapter": settings.Adapter,
    "model.sampler": settings.SamplerSettings,
    "objective": Term,
    "batch": settings.BatchSettings,
    "optim": settings.OptimSettings,
    "optim.subspace": settings.Subspace,
    "optim.rpsft": settings.Rpsft,
    "optim.extrapolate": settings.Extrapolate,
    "budget": settings.Budget,
    "checkpoint": settings.CheckpointSettings,
    "eval": settings.EvalSettings,
    "Rows of a source": DataSource,
    "Teachers": teachers.TeacherModel,
}
ROLES = {
    "Sources": "source",
    "Signals": "signal",
    "Verifiers": "verifier",
    "Losses": "loss",
    "Weights": "weight",
    "Selectors": "selector",
    "Diagnostics": "diagnostic",
}
OWN = re.compile(r"`(\w+)` = `([^`]*)`")


def tables() -> dict[str, list[list[str]]]:
    """{heading: rows of its tables, header and rule left out}."""
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in line[1:].removesuffix("|").split("|")]
        if cells[0] not in ("field", "kind", "group") and set(cells[0]) != {"-"}:
            found.setdefault(heading, []).append(cells)
    return found


def written(default: Any) -> str:
    """A default as the page shows it."""
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return "none"
    if isinstance(default, Component):
        return f'`"{default.kind}"`'
    if isinstance(default, BaseModel):
        return "`{}`"
    return "`" + to_toml({"x": default}).removeprefix("x = ").strip() + "`"


def in_code(model: type[BaseModel]) -> dict[str, str]:
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    return {name: written(field.get_default(call_default_factory=True)) for name, field in fields.items()}


def built_in(role: str) -> dict[str, type[Component]]:
    return {kind: cls for kind, cls in kinds(role).items() if cls.__module__.startswith("statewise.")}


def components_on_page(heading: str) -> dict[str, dict[str, str]]:
    """{kind or group: {setting: default}}."""
    out: dict[str, dict[str, str]] = {}
    kind = ""
    for first, setting, default, _ in tables()[heading]:
        if first:
            kind = first.strip("`")
            out[kind] = {}
        if setting:
            out[kind][setting.strip("`")] = default
    return out


@pytest.mark.parametrize("heading", MODELS)
def test_settings(heading: str) -> None:
    on_page = {name.strip("`"): default for name, _, default, _ in tables()[heading]}
    assert on_page == in_code(MODELS[heading])


@pytest.mark.parametrize("heading", ROLES)
def test_components(heading: str) -> None:
    """A source's settings of rows are in a table of their own."""
    rows = in_code(DataSource)
    expected = {
        kind: {n: v for n, v in in_code(cls).items() if not (issubclass(cls, DataSource) and n in rows)}
        for kind, cls in built_in(ROLES[heading]).items()
    }
    assert components_on_page(heading) == expected


def test_tasks() -> None:
    groups = components_on_page("Settings of tasks")
    on_page: dict[str, dict[str, str]] = {}
    for kind, takes, own, _ in tables()["Tasks"]:
        shared = {name: default for group in takes.split(", ") for name, default in groups[group].items()}
        on_page[kind.strip("`")] = shared | {name: f"`{value}`" for name, value in OWN.findall(own)}
    assert on_page == {kind: in_code(cls) for kind, cls in built_in("task").items()}


def test_every_role_has_a_heading() -> None:
    assert set(registry.BUILTIN) - set(ROLES.values()) == {"task"}


def test_every_row_says_something() -> None:
    for heading, rows in tables().items():
        assert [row for row in rows if not re.search(r"\w", row[-1])] == [], heading
