"""A recipe: model, source, signal, objective and how to run them. Frozen, hashed, TOML both ways."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, PrivateAttr, field_serializer, field_validator, model_validator

from statewise.component import BASE_COLUMNS, Diagnostic, Signal, Source, build, load_plugin, parse
from statewise.errors import RecipeError, nearest
from statewise.objective import Term
from statewise.overrides import apply_overrides
from statewise.plugins import find_file
from statewise.refusals import refuse
from statewise.selectors import Actions
from statewise.settings import BatchSettings, Budget, CheckpointSettings, EvalSettings, ModelSettings, OptimSettings

SHIPPED = Path(__file__).parent / "recipes"


class Recipe(BaseModel):
    """What to train and how; the same recipe, seed and machine give the same bytes on a CPU."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelSettings = ModelSettings()
    source: Source
    signal: tuple[Signal, ...]
    objective: tuple[Term, ...]
    batch: BatchSettings = BatchSettings()
    optim: OptimSettings = OptimSettings()
    budget: Budget
    checkpoint: CheckpointSettings = CheckpointSettings()
    eval: EvalSettings = EvalSettings()
    diagnostics: tuple[Diagnostic, ...] = ()
    plugins: tuple[str, ...] = ()
    seed: int = 0

    _name: str = PrivateAttr("recipe")
    _base_dir: Path = PrivateAttr(Path("."))

    @field_validator("source", mode="before")
    @classmethod
    def _source(cls, value: Any) -> Any:
        return parse("source", value, "source")

    @field_validator("signal", mode="before")
    @classmethod
    def _signal(cls, value: Any) -> Any:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(parse("signal", item, f"signal[{i}]") for i, item in enumerate(items))

    @field_validator("diagnostics", mode="before")
    @classmethod
    def _diagnostics(cls, value: Any) -> Any:
        return tuple(parse("diagnostic", item, f"diagnostics[{i}]") for i, item in enumerate(value))

    @field_validator("objective", mode="before")
    @classmethod
    def _objective(cls, value: Any) -> Any:
        items = value if isinstance(value, list | tuple) else [value]
        if not items:
            raise RecipeError('objective: is empty; expected at least one term such as { loss = "nll" }.')
        return tuple(_term(item, f"objective[{i}]") for i, item in enumerate(items))

    @field_serializer("source", "signal", "diagnostics")
    def _plain(self, value: Any) -> Any:
        return [v.to_plain() for v in value] if isinstance(value, tuple) else value.to_plain()

    @model_validator(mode="after")
    def _sensible(self) -> Recipe:
        refuse(self)
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """Read a TOML file, or a shipped recipe by name, and apply overrides such as "optim.lr=1e-4".

        Raises RecipeError naming file and field.
        """
        file = find_recipe(path)
        try:
            plain = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RecipeError(f"{file}: is not valid TOML: {error}") from None
        return cls.from_plain(plain, overrides, name=file.stem, base_dir=file.parent)

    @classmethod
    def from_plain(
        cls, plain: dict[str, Any], overrides: Sequence[str] = (), *, name: str = "recipe", base_dir: Path = Path(".")
    ) -> Recipe:
        """A recipe from nested dicts, as TOML holds them; plug-ins named in it are loaded first."""
        plain = apply_overrides(plain, overrides, list(cls.model_fields))
        for plugin in plain.get("plugins", []):
            load_plugin(plugin, base_dir)
        recipe = build(cls, plain, name)
        recipe._name, recipe._base_dir = name, base_dir
        return recipe

    @property
    def name(self) -> str:
        return self._name

    @property
    def base_dir(self) -> Path:
        return self._base_dir

    def to_plain(self) -> dict[str, Any]:
        """Nested dicts without defaults and without None, as TOML holds them."""
        plain = _without_none(self.model_dump(mode="json", exclude_defaults=True))
        default = Actions().to_plain()  # pydantic compares what is written with the default object, and keeps these
        plain["objective"] = [{k: v for k, v in t.items() if (k, v) != ("on", default)} for t in plain["objective"]]
        optional = {name for name, field in type(self).model_fields.items() if not field.is_required()}
        return {name: v for name, v in plain.items() if v not in ({}, []) or name not in optional}

    def to_toml(self) -> str:
        """TOML that loads to an equal recipe."""
        from statewise.overrides import to_toml

        return to_toml(self.to_plain())

    @property
    def hash(self) -> str:
        """Content hash, 12 hexadecimal digits: of every setting (defaults included) and of the text of plug-ins."""
        return self._digest(self.model_dump(mode="json"))[:12]

    @property
    def identity(self) -> str:
        """As `hash`, but of the settings that differ from their defaults: a later version with more settings keeps it."""
        return self._digest(self.to_plain())[:12]

    def _digest(self, settings: dict[str, Any]) -> str:
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        own = [name for part in (self.source, *self.signal) for name in part.files()]
        for name in [*(plugin for plugin in self.plugins if plugin.endswith(".py")), *own]:
            file = find_file(name, self._base_dir)
            if file is not None:
                digest.update(file.read_bytes())
        return digest.hexdigest()

    def provided(self, author: str | None = None) -> frozenset[str]:
        """Columns and capabilities that source and signals write; on tokens of `author` alone, where it is given."""
        leaves = [leaf for leaf in self.source.leaves if author in leaf.authors]
        by_source = frozenset.intersection(*(s.columns_written() for s in leaves or [self.source]))
        return by_source.union(BASE_COLUMNS, *(s.columns_written() for s in self.signal))

    def reads(self) -> frozenset[str]:
        """Columns and capabilities that anything in the recipe uses."""
        parts = [self.source, *self.signal, *(p for term in self.objective for p in term.parts)]
        return frozenset().union(*(p.columns_read() for p in parts))

    @property
    def draws(self) -> int:
        """How often a step may ask the source."""
        return max((signal.draws for signal in self.signal), default=1)

    def models(self) -> list[Any]:
        """`TeacherModel` settings of the other models that source and signals use."""
        return [model for part in (self.source, *self.signal) for model in part.models()]

    def explain(self) -> list[str]:
        """The method in words: states, signal, loss with its normalisation, optimizer, budget."""
        optim = self.optim
        budget = ", ".join(f"{k} = {v:g}" for k, v in self.budget.model_dump(exclude_none=True).items())
        adapter = self.model.adapter
        trained = f"LoRA rank {adapter.rank}, alpha {adapter.alpha:g}" if adapter else "all parameters"
        return [
            f"states:    {self.source.describe()}",
            f"signal:    {', '.join(s.describe() for s in self.signal)}",
            *(f"loss {i + 1}:    {term.words()}" for i, term in enumerate(self.objective)),
            f"model:     {self.model.path}, {trained}, dtype {self.model.dtype}",
            f"update:    {optim.optimizer}, lr {optim.lr:g} {optim.schedule}, warm-up {optim.warmup:g}, "
            f"gradient norm clipped at {optim.clip_norm}",
            *optim.words(),
            f"batch:     {self.batch.rollouts} sequences a step in {self.batch.minibatches} update(s)",
            f"budget:    {budget}; seed {self.seed}",
        ]


def _term(value: Any, where: str) -> Term:
    if isinstance(value, Term):
        return value
    if isinstance(value, str):
        value = {"loss": value}
    return build(Term, value, where)


def find_recipe(path: str | Path) -> Path:
    """The file of a path or of a shipped recipe's name."""
    file = Path(path)
    if file.is_file():
        return file
    shipped = {p.stem: p for p in sorted(SHIPPED.glob("*.toml"))}
    if str(path) in shipped:
        return shipped[str(path)]
    raise RecipeError(f"no recipe '{path}': neither a file nor a shipped recipe{nearest(str(path), shipped)}")


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    return {p.stem: p for p in sorted(SHIPPED.glob("*.toml"))}


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list) else value
