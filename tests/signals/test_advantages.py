"""Advantages: values by hand, and what holds for any rewards."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statewise.signals.advantages import BASELINES, advantages, is_flat

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.0]  # mean 0.4, deviation sqrt(1.2 / 4)
HAND = {
    "mean": [0.6, -0.4, -0.4, 0.6, -0.4],
    "mean_std": [v / (math.sqrt(0.3) + 1e-4) for v in (0.6, -0.4, -0.4, 0.6, -0.4)],
    "leave_one_out": [0.75, -0.5, -0.5, 0.75, -0.5],
    "none": REWARDS,
}
groups_of_rewards = st.lists(st.floats(-5, 5), min_size=2, max_size=12)


@pytest.mark.parametrize("name", HAND)
def test_by_hand(name: str):
    assert BASELINES[name](REWARDS) == pytest.approx(HAND[name], abs=1e-12)


@pytest.mark.parametrize("name", HAND)
def test_groups_do_not_mix(name: str):
    mixed = advantages([1.0, 9.0, 0.0, 4.0], [7, 3, 7, 3], name)  # type: ignore[arg-type]
    first, second = BASELINES[name]([1.0, 0.0]), BASELINES[name]([9.0, 4.0])
    assert mixed == [first[0], second[0], first[1], second[1]]


@given(groups_of_rewards)
def test_leave_one_out_is_the_distance_to_the_others(rewards: list[float]):
    for index, value in enumerate(BASELINES["leave_one_out"](rewards)):
        others = rewards[:index] + rewards[index + 1 :]
        assert value == pytest.approx(rewards[index] - sum(others) / len(others), abs=1e-9)


@given(groups_of_rewards, st.floats(-3, 3))
def test_baselines_ignore_a_constant_and_sum_to_zero(rewards: list[float], shift: float):
    for name in ("mean", "mean_std", "leave_one_out"):
        values = BASELINES[name](rewards)
        assert sum(values) == pytest.approx(0, abs=1e-3)
        if not is_flat(rewards) and max(rewards) - min(rewards) > 1e-3:
            assert BASELINES[name]([r + shift for r in rewards]) == pytest.approx(values, abs=1e-6, rel=1e-6)


@given(st.floats(-5, 5), st.integers(1, 8))
def test_equal_rewards_say_nothing(reward: float, size: int):
    for name in ("mean", "mean_std", "leave_one_out"):
        assert BASELINES[name]([reward] * size) == pytest.approx([0.0] * size, abs=1e-9)
    assert is_flat([reward] * size)


def test_a_group_of_one_has_no_advantage():
    assert advantages([1.0], [0], "mean_std") == advantages([1.0], [0], "leave_one_out") == [0.0]
    assert advantages([1.0], [0], "none") == [1.0]
