"""Rewards of a verifier, and the advantages that follow from them."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from statewise.component import Signal, Source
from statewise.errors import RecipeError
from statewise.signals.advantages import Baseline, advantages, is_flat, members_of
from statewise.sources.judging import judged, self_test
from statewise.verifier import Verifier, parse_verifier

if TYPE_CHECKING:
    from statewise.types import Rollout, World


class Reward(Signal, kind="reward"):
    """Writes `rewards` and `advantages`, the same at all tokens of a rollout.

    advantage: "mean", "mean_std" and "leave_one_out" compare a rollout with its group; "none" is the reward itself.
    zero_variance: what becomes of groups whose rewards are all equal.
      "keep"    trained, with advantages of 0 that count in denominators
      "drop"    left out, so that the batch is smaller
      "refill"  left out, and the source is asked again until the batch is full, at most `max_draws` times a step:
                dynamic sampling, arXiv 2503.14476
    self_test: the verifier must accept reference answers and reject what answers everything.
    """

    writes: ClassVar[tuple[str, ...]] = ("rewards", "advantages")

    verifier: Verifier
    advantage: Baseline = "mean_std"
    zero_variance: Literal["keep", "drop", "refill"] = "keep"
    max_draws: int = Field(10, ge=2)
    self_test: bool = True

    @field_validator("verifier", mode="before")
    @classmethod
    def _parsed(cls, value: Any) -> Any:
        return parse_verifier(value, "signal.reward.verifier")

    @field_serializer("verifier")
    def _plain(self, value: Verifier) -> Any:
        return value.to_plain()

    @model_validator(mode="after")
    def _drops_what_is_empty(self) -> Reward:
        if self.zero_variance != "keep" and self.advantage == "none":
            raise RecipeError(
                f"signal.reward: zero_variance = '{self.zero_variance}' leaves out groups that say nothing, and with advantage "
                "= 'none' a group of equal rewards says something; take a group baseline, or zero_variance = 'keep'."
            )
        if self.zero_variance != "refill" and "max_draws" in self.model_fields_set:
            raise RecipeError(
                f"signal.reward.max_draws: belongs to zero_variance = 'refill', and zero_variance is '{self.zero_variance}', "
                "which draws once a step."
            )
        return self

    @property
    def draws(self) -> int:
        return self.max_draws if self.zero_variance == "refill" else 1

    def describe(self) -> str:
        flat = {"keep": "kept", "drop": "dropped", "refill": f"replaced, at most {self.max_draws} draws a step"}
        return (
            f"reward by {self.verifier.describe()}, advantage {self.advantage} in groups, groups of equal rewards "
            f"{flat[self.zero_variance]}"
        )

    def files(self) -> tuple[str, ...]:
        return self.verifier.files()

    def before_training(self, source: Source, world: World) -> None:
        if self.self_test:
            examples = [e for leaf in source.leaves for e in leaf.examples(world)]
            self_test(self.verifier, examples, world.base_dir, "signal.reward.verifier")

    def annotate(self, rollouts: list[Rollout], world: World) -> list[Rollout]:
        sampled = [r for r in rollouts if is_sampled(r)]
        written = [r.with_columns(advantages=[0.0] * r.num_tokens) for r in rollouts if not is_sampled(r)]
        return [*self._judged(sampled, world), *written] if sampled else written

    def _judged(self, rollouts: list[Rollout], world: World) -> list[Rollout]:
        verdicts = judged(self.verifier, rollouts, world)
        rewards, groups = verdicts.scores, [r.group for r in rollouts]
        flat = [members for members in members_of(groups) if is_flat([rewards[i] for i in members])]
        world.report(
            {
                "reward": fmean(rewards),
                "reward_std": pstdev(rewards),
                "zero_variance_share": len(flat) / len(set(groups)),
                "num_verifier_timeouts": verdicts.num_timeouts,
            }
        )
        dropped = {i for members in flat for i in members} if self.zero_variance != "keep" else set()
        values = advantages(rewards, groups, self.advantage)
        return [
            replace(rollout.with_columns(advantages=[values[i]] * rollout.num_tokens), reward=rewards[i])
            for i, rollout in enumerate(rollouts)
            if i not in dropped
        ]


def is_sampled(rollout: Rollout) -> bool:
    """Whether a model wrote part of it; what a data set holds needs no verdict."""
    return any(s.author in ("policy", "teacher") for s in rollout.segments)
