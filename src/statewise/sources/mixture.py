"""Several sources in one step, with weights that are constant or move with the run's progress."""

from __future__ import annotations

from dataclasses import replace
from math import floor, lcm, nan
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, field_validator

from statewise.component import Source, parse
from statewise.errors import RecipeError
from statewise.types import Example, Rollout, Segment

if TYPE_CHECKING:
    from statewise.types import World

Inner = Annotated[
    Source,
    BeforeValidator(lambda value: parse("source", value, "source.parts.source")),
    PlainSerializer(lambda value: value.to_plain()),
]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Part(BaseModel):
    """A source and its weight: a number, or [at the start, at the end] of the run, linear in its progress between them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Inner
    weight: Weight | tuple[Weight, Weight] = 1.0
    name: str | None = None

    @property
    def label(self) -> str:
        return self.name or self.source.kind

    def weight_at(self, progress: float) -> float:
        if isinstance(self.weight, tuple):
            start, end = self.weight
            return start + (end - start) * progress
        return self.weight


class Mixture(Source, kind="mixture"):
    """Each step's rollouts come from the parts in proportion to their weights, exactly, by largest remainder.

    Groups are kept whole. A column that only some parts write is NaN on the rollouts of the others, so that a term that
    reads it must name its tokens, such as on = { kind = "author", author = "policy" }.
    """

    parts: list[Part] = Field(min_length=1)

    @field_validator("parts")
    @classmethod
    def _sound(cls, parts: list[Part]) -> list[Part]:
        labels = [part.label for part in parts]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise RecipeError(f"source.parts: '{twice[0]}' occurs twice; give the parts a `name` each.")
        for progress in (0.0, 1.0):
            if not sum(part.weight_at(progress) for part in parts) > 0:
                raise RecipeError("source.parts: all weights are 0 at the start or at the end of the run.")
        temperatures = {part.source.policy_temperature for part in parts if part.source.needs_policy}
        if len(temperatures) > 1:
            raise RecipeError(
                f"source.parts: the policy samples at the temperatures {sorted(temperatures)}; expected one, since the "
                "policy that is trained is meant at the temperature of its states."
            )
        return parts

    @property
    def needs_policy(self) -> bool:  # type: ignore[override]
        return any(part.source.needs_policy for part in self.parts)

    @property
    def policy_temperature(self) -> float:
        return next((p.source.policy_temperature for p in self.parts if p.source.needs_policy), 1.0)

    @property
    def part_names(self) -> tuple[str, ...]:
        return tuple(part.label for part in self.parts)

    @property
    def leaves(self) -> tuple[Source, ...]:
        return tuple(leaf for part in self.parts for leaf in part.source.leaves)

    def columns_written(self) -> frozenset[str]:
        """What every part writes."""
        return frozenset.intersection(*(part.source.columns_written() for part in self.parts))

    def columns_read(self) -> frozenset[str]:
        return frozenset().union(*(part.source.columns_read() for part in self.parts))

    def models(self) -> tuple[Any, ...]:
        return tuple(model for part in self.parts for model in part.source.models())

    def examples(self, world: World) -> list[Example]:
        return [example for part in self.parts for example in part.source.examples(world)]

    def files(self) -> tuple[str, ...]:
        return tuple(file for part in self.parts for file in part.source.files())

    def before_training(self, source: Source, world: World) -> None:
        for part in self.parts:
            part.source.before_training(part.source, world)

    def describe(self) -> str:
        shown = [f"{p.weight} x {p.source.describe()}" for p in self.parts]
        return f"mixture({', '.join(shown)})"

    def counts(self, num_rollouts: int, progress: float) -> list[int]:
        """Rollouts of each part. Raises RecipeError where they can't be whole groups."""
        unit = lcm(*(getattr(part.source, "group_size", 1) for part in self.parts))
        if num_rollouts % unit:
            raise RecipeError(
                f"source 'mixture': received {num_rollouts} rollouts for a step, expected a multiple of {unit}, the least "
                "common multiple of the parts' group_size."
            )
        weights = [part.weight_at(progress) for part in self.parts]
        return [unit * n for n in largest_remainder(weights, num_rollouts // unit)]

    def sample(self, step: int, num_rollouts: int, world: World) -> list[Rollout]:
        mixed: list[Rollout] = []
        start = 0
        counts = self.counts(num_rollouts, world.progress)
        for index, (part, count) in enumerate(zip(self.parts, counts, strict=True)):
            drawn = part.source.sample(step, count, _part_of(world, part.label)) if count else []
            groups = {old: start + new for new, old in enumerate(dict.fromkeys(r.group for r in drawn))}
            start += len(groups)
            mixed += [_marked(replace(r, group=groups[r.group]), index) for r in drawn]
        world.report({f"{p.label}/num_rollouts": n for p, n in zip(self.parts, counts, strict=True)})
        return aligned(mixed)


def _part_of(world: World, label: str) -> World:
    return replace(world, report=lambda row: world.report({f"{label}/{name}": v for name, v in row.items()}))


def _marked(rollout: Rollout, index: int) -> Rollout:
    return rollout.with_columns(part=[float(index)] * rollout.num_tokens)


def aligned(rollouts: list[Rollout]) -> list[Rollout]:
    """All with the same columns: NaN where a rollout has no value of its own."""
    names = sorted({name for r in rollouts for name in r.columns})
    known = any(s.logprobs is not None for r in rollouts for s in r.segments if s.train)
    return [_filled(r, names, known) for r in rollouts]


def _filled(rollout: Rollout, names: list[str], logprobs: bool) -> Rollout:
    lacking = [n for n in names if n not in rollout.columns]
    if logprobs:
        rollout = replace(rollout, segments=tuple(_with_logprobs(s) for s in rollout.segments))
    return rollout.with_columns(**{n: [nan] * rollout.num_tokens for n in lacking})


def _with_logprobs(segment: Segment) -> Segment:
    if segment.logprobs is not None or not segment.train:
        return segment
    return replace(segment, logprobs=(nan,) * len(segment.tokens))


def largest_remainder(weights: list[float], total: int) -> list[int]:
    """Integers that sum to `total`, each within 1 of its share; equal remainders go to the earlier one."""
    whole = sum(weights)
    shares = [weight / whole * total for weight in weights]
    counts = [floor(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
    for index in order[: total - sum(counts)]:
        counts[index] += 1
    return counts
