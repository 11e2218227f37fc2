"""What a study's TOML file says."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from statewise.component import build
from statewise.errors import RecipeError
from statewise.overrides import apply_overrides
from statewise.settings import Budget, Settings

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+=-]*")


class Resources(Settings):
    """What one run takes: processor cores (its threads), GPUs and memory in GiB.

    slurm: further parameters of submitit's executor, such as { slurm_partition = "gpu", timeout_min = 240 }.
    """

    cpus: int = Field(1, ge=1)
    gpus: float = Field(0, ge=0)
    memory_gib: float | None = Field(None, gt=0)
    slurm: dict[str, Any] = {}


class Arm(Settings):
    """One way of training. `set`: overrides of the recipe, as on the command line of `train`.

    recipe: instead of the study's base; budget: instead of the study's, which the table then says.
    axes: {override key: values}; every combination is an arm of its own. alone: without the study's `set` and `axes`, such
    as a teacher that others start from.
    """

    recipe: str | None = None
    set: list[str] = []
    axes: dict[str, list[Any]] = {}
    seeds: list[int] | None = None
    budget: Budget | None = None
    alone: bool = False
    about: str = ""


class Study(Settings):
    """Base recipe, arms, axes, seeds, one budget, and the tasks that every arm is evaluated on.

    base: a shipped recipe's name, or a file (beside the study, or from here).
    tasks: of all arms; default: the base recipe's. target: the task to gain on. retention: those to keep; default: the
    others where higher is better.
    versus: the arm that the others are compared with, beside the untrained model.
    """

    base: str
    about: str = ""
    target: str
    retention: list[str] | None = None
    versus: str | None = None
    seeds: list[int] = [0]
    budget: Budget | None = None
    tasks: list[Any] | None = None
    set: list[str] = []
    axes: dict[str, list[Any]] = {}
    arms: dict[str, Arm] = {}
    resources: Resources = Resources()

    @field_validator("arms")
    @classmethod
    def _names(cls, value: dict[str, Arm]) -> dict[str, Arm]:
        wrong = [name for name in value if not NAME.fullmatch(name) or name == "base"]
        if wrong:
            raise RecipeError(
                f"arms: received the name {wrong[0]!r}; expected letters, digits and _ . + = -, and not 'base', which is "
                "the untrained model."
            )
        return value

    @model_validator(mode="after")
    def _sensible(self) -> Study:
        for where, values in [
            ("seeds", self.seeds),
            *((f"arms.{n}.seeds", a.seeds or [0]) for n, a in self.arms.items()),
        ]:
            if not values or len(set(values)) < len(values):
                raise RecipeError(f"{where}: received {values}, expected at least one seed and none twice.")
        axes = [("axes", self.axes), *((f"arms.{name}.axes", arm.axes) for name, arm in self.arms.items())]
        empty = [f"{where}.{key}" for where, table in axes for key, values in table.items() if not values]
        if empty:
            raise RecipeError(f"{empty[0]}: is empty; expected at least one value.")
        return self


def load(file: str | Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study, with overrides such as `seeds=[0]` of what it says. Raises RecipeError naming file and field."""
    path = Path(file)
    try:
        plain = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: can't be read: {error.strerror}; expected a study's TOML file.") from None
    except ValueError as error:
        raise RecipeError(f"{path}: is not valid TOML: {error}") from None
    return build(Study, apply_overrides(plain, overrides, list(Study.model_fields)), str(path))
