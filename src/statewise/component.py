"""Components: configuration and behaviour in one frozen object, registered by `kind`.

A user adds a loss, weight, selector, verifier, source, signal, task or diagnostic by subclassing one of the roles:

    class Focal(Weight, kind="focal"):
        power: float = 2.0
        needs = ("logprobs",)

        def __call__(self, stats, batch):
            return (1 - stats.logprobs.exp()) ** self.power

and naming the file in the recipe (`plugins = ["focal.py"]`). User code runs only where the user named it.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from statewise.errors import RecipeError, nearest
from statewise.foreign import hint
from statewise.plugins import load_file, load_module
from statewise.registry import REGISTRY, kinds, register

if TYPE_CHECKING:
    import torch

    from statewise.types import Author, Batch, EvalContext, Example, Rollout, TokenStats, World

# What is always in a batch; a component that reads these needs nobody to write them.
BASE_COLUMNS = frozenset({"tokens", "action_mask", "author", "position", "sequence", "group"})
# Names in `reads`/`writes` that say what a state carries; they are not columns.
CAPABILITIES = frozenset({"gold"})
STATS = frozenset({"logprobs", "entropy", "logits"})


class Component(BaseModel):
    """A frozen, validated setting that can also act. Subclasses with a `kind` are registered under their role."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=False)

    role: ClassVar[str] = ""
    kind: ClassVar[str] = ""
    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, kind: str | None = None, role: str | None = None, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if role is not None:
            cls.role = role
            REGISTRY.setdefault(role, {})
        if kind is not None:
            cls.kind = kind
            register(cls)

    def columns_read(self) -> frozenset[str]:
        """Columns and capabilities that this object uses; override where they depend on the settings."""
        return frozenset(self.reads)

    def columns_written(self) -> frozenset[str]:
        """Columns and capabilities that this object provides; override where they depend on the settings."""
        return frozenset(self.writes)

    def models(self) -> tuple[Any, ...]:
        """`TeacherModel` settings of the models other than the policy that this object uses."""
        return ()

    def files(self) -> tuple[str, ...]:
        """Files beside the recipe whose text decides what this object does; it goes into the recipe's hash."""
        return ()

    def before_training(self, source: Source, world: World) -> None:
        """Once, before the first step of a recipe with this source: checks that need the opened resources."""

    def describe(self) -> str:
        """The object in words, for `recipe show` and run cards."""
        settings = ", ".join(f"{k}={v!r}" for k, v in self.model_dump(exclude_defaults=True).items())
        return f"{self.kind}({settings})" if settings else self.kind

    def to_plain(self) -> dict[str, Any]:
        """`{"kind": ..., settings}` with defaults left out: what TOML holds."""
        return {"kind": self.kind, **self.model_dump(exclude_defaults=True, mode="json")}


class Source(Component, role="source"):
    """Whose states are visited. `sample` depends on (seed, step, current weights) and on nothing else.

    `needs_policy`: it samples from the current weights, so that nothing can be drawn before the model is loaded.
    `authors`: of the tokens that it trains.
    """

    needs_policy: ClassVar[bool] = False
    authors: ClassVar[tuple[Author, ...]] = ("dataset",)

    @property
    def leaves(self) -> tuple[Source, ...]:
        """The sources that this one is made of; itself, where it is not a combination."""
        return (self,)

    @property
    def part_names(self) -> tuple[str, ...]:
        """Of a mixture: names of its sources, by which metrics are split; the column `part` holds a rollout's index."""
        return ()

    @property
    def policy_temperature(self) -> float:
        """The policy that is trained is softmax(logits / policy_temperature): what the source sampled from, if it did."""
        return 1.0

    @abstractmethod
    def sample(self, step: int, num_rollouts: int, world: World) -> list[Rollout]:
        """The rollouts of one optimizer step, the same on every rank; where `needs_policy`, there may be none."""

    def examples(self, world: World) -> list[Example]:
        """What its rollouts answer, where that is known beforehand."""
        return []

    def num_examples(self, world: World) -> int | None:
        """How many examples make an epoch; None where the source has no end."""
        return None


class Signal(Component, role="signal"):
    """What information arrives at a state."""

    @property
    def draws(self) -> int:
        """How often a step may ask the source, until `annotate` has left as many rollouts as the batch holds."""
        return 1

    def annotate(self, rollouts: list[Rollout], world: World) -> list[Rollout]:
        """Once a step, whole groups: returns rollouts with columns, rewards or masks added."""
        return rollouts

    def attach(self, batch: Batch, world: World) -> Batch:
        """A micro-batch, under no_grad: dense things such as another model's logits."""
        return batch


class Loss(Component, role="loss"):
    """A value a token (`scope = "token"`: [B, T]), a sequence ("sequence": [S]) or a group ("group": [G]), in nats.

    A loss of whole sequences or groups sees as actions only what the term's selector chose.

    `is_divergence`: 0 with zero gradient where the policy equals the distribution it is compared with.
    """

    scope: ClassVar[str] = "token"
    is_divergence: ClassVar[bool] = False
    words: ClassVar[str] = ""

    @abstractmethod
    def __call__(self, stats: TokenStats, batch: Batch) -> torch.Tensor:
        """The loss of every token, sequence or group; a token-scope loss may look at one token alone."""

    def monitor(self, stats: TokenStats, batch: Batch) -> dict[str, torch.Tensor]:
        """What to log beside the loss, {name: [B, T], [S] or [G] as its scope is}; the mean is reported."""
        return {}


class Weight(Component, role="weight"):
    """A factor a token, evaluated on detached statistics under no_grad, so that it can't leak a gradient."""

    scope: ClassVar[str] = "token"
    words: ClassVar[str] = ""

    @abstractmethod
    def __call__(self, stats: TokenStats, batch: Batch) -> torch.Tensor:
        """Non-negative weights, [B, T]."""

    def monitor(self, stats: TokenStats, batch: Batch) -> dict[str, torch.Tensor]:
        """What to log beside the weight, {name: [B, T]}; the mean over the term's tokens is reported."""
        return {}


class Selector(Component, role="selector"):
    """Which of the action tokens a term is about; decided from columns before the forward pass."""

    @abstractmethod
    def __call__(self, batch: Batch) -> torch.Tensor:
        """Float multipliers [B, T]: 0 = not selected; a value other than 1 compensates for what was left out."""


class Task(Component, role="task"):
    """An evaluation with per-example records; see `statewise.evals`."""

    @abstractmethod
    def run(self, context: EvalContext) -> list[dict[str, Any]]:
        """One record an example, each with `id` and `score`."""

    def check_files(self, base_dir: Path) -> None:
        """Before a model is loaded: raises where the files that `run` needs aren't there or hold something else."""


class Diagnostic(Component, role="diagnostic"):
    """What is seen of a run: while it trains, and in a table computed from its directory, with figures drawn from it."""

    def watch(self, world: World) -> Any:
        """A `statewise.training.hooks.Hook` that looks on while the run trains, opened before its first step; or None."""
        return None

    @abstractmethod
    def compute(self, run: Any) -> list[dict[str, Any]]:
        """Rows of plain values."""

    def render(self, table: list[dict[str, Any]]) -> list[Any]:
        """Figures drawn from the rows."""
        return []


def parse(role: str, value: Any, where: str) -> Component:
    """A component from `"kind"`, `{"kind": ..., settings}` or a component; `where` names the field in messages."""
    if isinstance(value, Component):
        if value.role != role:
            raise RecipeError(f"{where}: received the {value.role} '{value.kind}', expected a {role}.")
        return value
    if isinstance(value, str):
        value = {"kind": value}
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise RecipeError(
            f'{where}: received {value!r}, expected a {role} such as "{next(iter(kinds(role)), "name")}" '
            f'or {{ kind = "...", setting = ... }}.'
        )
    known = kinds(role)
    kind = value["kind"]
    if kind not in known:
        raise RecipeError(f"{where}: unknown {role} '{kind}'{nearest(kind, known)}")
    settings = {k: v for k, v in value.items() if k != "kind"}
    return build(known[kind], settings, where)


def build(cls: type[BaseModel], settings: dict[str, Any], where: str) -> Any:
    """Validate `settings` into `cls`; a failure is a RecipeError that names field, value and remedy."""
    try:
        return cls.model_validate(settings)
    except ValidationError as error:
        raise RecipeError("\n".join(_explain(cls, item, where) for item in error.errors())) from None


def _explain(cls: type[BaseModel], item: Any, where: str) -> str:
    path = ".".join(str(part) for part in item["loc"])
    field = f"{where}.{path}" if path else where
    if item["type"] == "extra_forbidden":
        last = str(item["loc"][-1])
        return f"{field}: unknown key{hint(last, _fields_at(cls, item['loc'][:-1]))}"
    if item["type"] == "missing":
        return f"{field}: is missing and has no default."
    return f"{field}: received {item['input']!r}; {item['msg'].removeprefix('Value error, ')}."


def _fields_at(cls: type[BaseModel], loc: Sequence[Any]) -> list[str]:
    for part in loc:
        field = cls.model_fields.get(str(part))
        inner = None if field is None else field.annotation
        for option in [inner, *getattr(inner, "__args__", ())]:
            if inspect.isclass(option) and issubclass(option, BaseModel):
                cls = option
                break
        else:
            return []
    return list(cls.model_fields)


def load_plugin(name: str, base: Path | None = None) -> list[type[Component]]:
    """Import a plug-in by file path (`my_loss.py`), module (`package.module`) or entry point.

    Returns the components that the file, or the module's package, defines; those that it imports from elsewhere are not its.
    """
    is_file = name.endswith(".py")
    before = set(_registered()) if is_file else set()  # an earlier file of the same name has the same module
    module = load_file(name, base) if is_file else load_module(name)
    package = module.__name__.partition(".")[0]
    return [c for c in _registered() if c not in before and c.__module__.partition(".")[0] == package]


def _registered() -> list[type[Component]]:
    return [c for by_kind in REGISTRY.values() for c in by_kind.values()]
