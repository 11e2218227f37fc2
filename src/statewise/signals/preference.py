"""Which of two completions of a prompt is preferred."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from statewise.component import Signal
from statewise.errors import DataError

if TYPE_CHECKING:
    from statewise.types import Rollout, World


class Preference(Signal, kind="preference"):
    """Writes `preferences`: 1 on the rollout of a group with the largest reward, -1 on the one with the smallest.

    Of equals the first counts. Other rollouts of a group are left out of the step, and so are groups whose rewards are
    all equal: nothing is preferred there; `num_pairs` and `num_tied_groups` are reported. Pairs of a data set have the
    rewards 1 and 0.
    """

    reads: ClassVar[tuple[str, ...]] = ("rewards",)
    writes: ClassVar[tuple[str, ...]] = ("preferences",)

    def annotate(self, rollouts: list[Rollout], world: World) -> list[Rollout]:
        groups: dict[int, list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group, []).append(rollout)
        out = []
        for group in groups.values():
            best, worst = max(group, key=_reward), min(group, key=_reward)
            if _reward(best) > _reward(worst):
                out += [r.with_columns(preferences=[sign] * r.num_tokens) for r, sign in ((best, 1.0), (worst, -1.0))]
        world.report({"num_pairs": len(out) // 2, "num_tied_groups": len(groups) - len(out) // 2})
        return out


def _reward(rollout: Rollout) -> float:
    if rollout.reward is None:
        raise DataError(f"signal 'preference': the rollout of sample '{rollout.example.id}' has no reward.")
    return rollout.reward
