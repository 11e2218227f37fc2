"""Completions of the policy that a verifier accepts, as gold tokens: rejection sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_serializer, field_validator

from statewise.component import Source
from statewise.sources.judging import judged, self_test
from statewise.sources.policy import PolicySource
from statewise.types import Rollout
from statewise.verifier import Verifier, parse_verifier

if TYPE_CHECKING:
    from statewise.types import World


class RejectionSource(PolicySource, kind="rejection"):
    """The completions of the source 'policy' with a score of at least `threshold`; a step may hold none.

    keep: "all" of them, or the "best" of each prompt (of equal ones the first drawn). deduplicate: of completions of a
    prompt with the same tokens, only the first. Completions that were cut short count as rejected.
    """

    writes: ClassVar[tuple[str, ...]] = ("gold", "behavior_logprobs")

    truncated: Literal["mask", "resample"] = "mask"
    verifier: Verifier
    threshold: float = Field(1.0, allow_inf_nan=False)
    keep: Literal["all", "best"] = "all"
    deduplicate: bool = True
    self_test: bool = True

    @field_validator("verifier", mode="before")
    @classmethod
    def _parsed(cls, value: Any) -> Any:
        return parse_verifier(value, "source.verifier")

    @field_serializer("verifier")
    def _plain(self, value: Verifier) -> Any:
        return value.to_plain()

    def files(self) -> tuple[str, ...]:
        return self.verifier.files()

    def before_training(self, source: Source, world: World) -> None:
        if self.self_test:
            self_test(self.verifier, self.examples(world), world.base_dir, "source.verifier")

    def sample(self, step: int, num_rollouts: int, world: World) -> list[Rollout]:
        """What is accepted of `num_rollouts` completions."""
        drawn = super().sample(step, num_rollouts, world)
        verdicts = judged(self.verifier, drawn, world)
        scored = [replace(r, reward=score) for r, score in zip(drawn, verdicts.scores, strict=True)]
        accepted = [r for r in scored if r.num_action_tokens and (r.reward or 0.0) >= self.threshold]
        kept = self._kept(accepted)
        world.report(
            {
                "accepted_share": len(accepted) / len(scored),
                "solved_share": len({r.group for r in accepted}) / len({r.group for r in scored}),
                "num_kept": len(kept),
                "num_verifier_timeouts": verdicts.num_timeouts,
            }
        )
        return kept

    def _kept(self, accepted: Sequence[Rollout]) -> list[Rollout]:
        chosen: dict[Any, Rollout] = {}
        for index, rollout in enumerate(accepted):
            if self.keep == "best":
                key: Any = rollout.group
            else:
                key = (rollout.group, *rollout.tokens()) if self.deduplicate else index
            before = chosen.get(key)
            if before is None or (rollout.reward or 0.0) > (before.reward or 0.0):
                chosen[key] = rollout
        return list(chosen.values())
