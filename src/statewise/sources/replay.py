"""Past rollouts beside fresh ones; the only source with a state, which goes into the checkpoint."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from hashlib import blake2b
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer

from statewise.component import Source, parse
from statewise.types import Example, Rollout, Segment, derive_seed

if TYPE_CHECKING:
    from statewise.types import World

Inner = Annotated[
    Source,
    BeforeValidator(lambda value: parse("source", value, "source.source")),
    PlainSerializer(lambda value: value.to_plain()),
]


class Replay(Source, kind="replay"):
    """`source` with a share of its rollouts replaced by earlier ones, in whole groups.

    fraction: of a step's rollouts, at most, that are at least one and at most `max_age` steps old; a step takes fewer
    where there aren't so many. Each keeps the `behavior_logprobs` of the policy that wrote it, so that losses with a ratio
    weigh it by importance. Signals see replayed rollouts as they see fresh ones.
    """

    source: Inner
    fraction: float = Field(0.5, ge=0, lt=1)
    max_age: int = Field(4, ge=1)

    @property
    def needs_policy(self) -> bool:  # type: ignore[override]
        return self.source.needs_policy

    @property
    def policy_temperature(self) -> float:
        return self.source.policy_temperature

    @property
    def leaves(self) -> tuple[Source, ...]:
        return self.source.leaves

    @property
    def group_size(self) -> int:
        return getattr(self.source, "group_size", 1)

    def columns_written(self) -> frozenset[str]:
        return self.source.columns_written()

    def columns_read(self) -> frozenset[str]:
        return self.source.columns_read()

    def models(self) -> tuple[Any, ...]:
        return self.source.models()

    def examples(self, world: World) -> list[Example]:
        return self.source.examples(world)

    def num_examples(self, world: World) -> int | None:
        return self.source.num_examples(world)

    def files(self) -> tuple[str, ...]:
        return self.source.files()

    def before_training(self, source: Source, world: World) -> None:
        self.source.before_training(self.source, world)

    def describe(self) -> str:
        return f"replay({self.fraction:g} up to {self.max_age} steps old, of {self.source.describe()})"

    def sample(self, step: int, num_rollouts: int, world: World) -> list[Rollout]:
        """A function of (seed, step, weights) and of what the last `max_age` steps drew."""
        kept = [g for g in world.state.get(self._key, []) if 1 <= step - g["step"] <= self.max_age]
        wanted = math.floor(self.fraction * num_rollouts / self.group_size)
        random = Random(derive_seed(world.seed, "replay", step))
        drawn = [kept[i] for i in sorted(random.sample(range(len(kept)), min(wanted, len(kept))))]
        old = [_rollouts(group) for group in drawn]
        fresh = _by_group(self.source.sample(step, num_rollouts - sum(len(g) for g in old), world))
        world.state[self._key] = [*kept, *(_plain(group, step) for group in fresh)]
        world.report(
            {
                "num_replayed": sum(len(g) for g in old),
                "replay_age": fmean(step - g["step"] for g in drawn) if drawn else 0.0,
            }
        )
        return [replace(r, group=index) for index, group in enumerate([*fresh, *old]) for r in group]

    @property
    def _key(self) -> str:
        """One buffer for each set of settings."""
        return f"replay/{blake2b(self.model_dump_json().encode(), digest_size=6).hexdigest()}"


def _by_group(rollouts: list[Rollout]) -> list[list[Rollout]]:
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    return list(groups.values())


def _plain(group: list[Rollout], step: int) -> dict[str, Any]:
    """A group as `World.state` holds it: text, numbers, lists and tensors."""
    import torch

    def segment(s: Segment) -> dict[str, Any]:
        logprobs = None if s.logprobs is None else torch.tensor(s.logprobs, dtype=torch.float64)
        return {**asdict(s), "tokens": torch.tensor(s.tokens, dtype=torch.int32), "logprobs": logprobs}

    def column(values: Any) -> Any:
        return torch.tensor(list(values), dtype=torch.float64)

    def rollout(r: Rollout) -> dict[str, Any]:
        return {
            "segments": [segment(s) for s in r.segments],
            "example": {**asdict(r.example), "messages": [dict(m) for m in r.example.messages]},
            "reward": r.reward,
            "columns": {name: column(values) for name, values in r.columns.items()},
            "stop_reason": r.stop_reason,
        }

    return {"step": step, "rollouts": [rollout(r) for r in group]}


def _rollouts(group: dict[str, Any]) -> list[Rollout]:
    def segment(s: dict[str, Any]) -> Segment:
        logprobs = None if s["logprobs"] is None else tuple(s["logprobs"].tolist())
        return Segment(**{**s, "tokens": tuple(s["tokens"].tolist()), "logprobs": logprobs})

    return [
        Rollout(
            tuple(segment(s) for s in r["segments"]),
            Example(**{**r["example"], "messages": tuple(r["example"]["messages"])}),
            reward=r["reward"],
            columns={name: values.tolist() for name, values in r["columns"].items()},
            stop_reason=r["stop_reason"],
        )
        for r in group["rollouts"]
    ]
