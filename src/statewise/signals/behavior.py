"""The policy's own view of the step's rollouts, taken once before the first update of the step."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, ClassVar

from statewise.component import Signal

if TYPE_CHECKING:
    from statewise.types import Rollout, World


class Behavior(Signal, kind="behavior"):
    """Writes `behavior_logprobs` and `behavior_entropy` (nats a token) of the policy at the start of the step, and
    `median_nll`: the median over the step's rollouts of each one's mean NLL over action tokens."""

    writes: ClassVar[tuple[str, ...]] = ("behavior_logprobs", "behavior_entropy", "median_nll")

    def annotate(self, rollouts: list[Rollout], world: World) -> list[Rollout]:
        assert world.scorer is not None
        scores = world.scorer.score([r.tokens() for r in rollouts], needs=("logprobs", "entropy"))
        means = []
        for rollout, score in zip(rollouts, scores, strict=True):
            trained = [s.train for s in rollout.segments for _ in s.tokens]
            taken = [v for i, (v, t) in enumerate(zip(score["logprobs"], trained, strict=True)) if t and i > 0]
            means.append(-sum(taken) / max(len(taken), 1))
        tau = median(means) if means else 0.0
        return [
            r.with_columns(
                behavior_logprobs=s["logprobs"], behavior_entropy=s["entropy"], median_nll=[tau] * r.num_tokens
            )
            for r, s in zip(rollouts, scores, strict=True)
        ]
