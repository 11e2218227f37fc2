"""Which rollouts of a group are preferred."""

from dataclasses import replace

import pytest

from statewise.errors import DataError
from statewise.signals import Preference
from statewise.testing import rollouts
from statewise.types import Rollout, World

WORLD = World(tokenizer=None, seed=0)


def with_rewards(*groups: list[float]) -> list[Rollout]:
    one = rollouts()[0]
    return [replace(one, group=g, reward=r) for g, rewards in enumerate(groups) for r in rewards]


def signs(annotated: list[Rollout]) -> list[tuple[int, float | None, float]]:
    return [(r.group, r.reward, r.columns["preferences"][0]) for r in annotated]


def test_best_against_worst_of_each_group():
    out = Preference().annotate(with_rewards([1.0, 0.0], [0.2, 0.9, 0.1, 0.9]), WORLD)
    assert signs(out) == [(0, 1.0, 1.0), (0, 0.0, -1.0), (1, 0.9, 1.0), (1, 0.1, -1.0)]
    assert all(set(r.columns["preferences"]) in ({1.0}, {-1.0}) for r in out)


def test_groups_of_equals_are_left_out_and_counted():
    seen: dict[str, float] = {}
    world = replace(WORLD, report=seen.update)
    out = Preference().annotate(with_rewards([1.0, 1.0], [0.0], [0.0, 1.0]), world)
    assert {r.group for r in out} == {2}
    assert seen == {"num_pairs": 1, "num_tied_groups": 2}


def test_a_missing_reward_is_named():
    with pytest.raises(DataError, match="sample 'sample-0' has no reward"):
        Preference().annotate([*with_rewards([1.0]), replace(rollouts()[0], group=0)], WORLD)
