"""Void combinations of sampled states and rewards: refused when the recipe is parsed, with the remedy named."""

from typing import Any

import pytest

from statewise.errors import RecipeError
from statewise.recipe import Recipe

POLICY = {"kind": "policy", "data": "tiny:math", "group_size": 4}
REWARD = {"kind": "reward", "verifier": "answer"}
CLIP = [{"loss": "clip"}]


def make(source: Any = POLICY, signal: Any = REWARD, objective: Any = CLIP, **rest: Any) -> Recipe:
    return Recipe.from_plain(
        {"source": source, "signal": [signal], "objective": objective, "budget": {"max_steps": 1}, **rest}
    )


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a group of one": ({"source": {**POLICY, "group_size": 1}}, r"groups of one.*Set source\.group_size above 1"),
    "a data set has no groups": (
        {"source": {"kind": "dataset", "data": "tiny:math"}, "objective": [{"loss": "reinforce"}]},
        "groups of one.*source = 'policy'",
    ),
    "part of a group": ({"batch": {"rollouts": 30}}, r"batch\.rollouts = 30: expected a multiple of .*group_size = 4"),
    "top-p": ({"source": {**POLICY, "top_p": 0.9}}, "'clip' reads 'advantages'.*another law.*top_p = 1"),
    "top-k": (
        {"source": {**POLICY, "top_k": 20}, "objective": [{"loss": "reinforce"}]},
        "'reinforce' reads 'advantages'.*another law",
    ),
    "no verifier": ({"signal": "reward"}, r"signal\[0\]\.verifier: is missing"),
    "no reward": ({"signal": "reference"}, "reads 'advantages', which nothing in this recipe writes.*signal 'reward'"),
    "gold tokens of the policy": ({"objective": ["nll"]}, "reads 'gold'.*source 'rejection'"),
    "code": ({"signal": {"kind": "reward", "verifier": "code"}}, "allow_code_execution = true"),
    "dropping without a baseline": (
        {"signal": {**REWARD, "advantage": "none", "zero_variance": "drop"}},
        "zero_variance = 'drop'",
    ),
    "refilling without a baseline": (
        {"signal": {**REWARD, "advantage": "none", "zero_variance": "refill"}},
        "zero_variance = 'refill'",
    ),
    "draws without refilling": (
        {"signal": {**REWARD, "zero_variance": "drop", "max_draws": 5}},
        r"max_draws: belongs to zero_variance = 'refill', and zero_variance is 'drop'",
    ),
    "one draw": (
        {"signal": {**REWARD, "zero_variance": "refill", "max_draws": 1}},
        "max_draws: .*greater than or equal to 2",
    ),
    "refilling from a buffer": (
        {"source": {"kind": "replay", "source": POLICY}, "signal": {**REWARD, "zero_variance": "refill"}},
        "source is 'replay'.*Expected source = 'policy'",
    ),
    "two rewards": ({"signal": [REWARD, REWARD]}, r"signal\[1\]: is a second 'reward'"),
    "greedy groups": ({"source": {**POLICY, "temperature": 0}}, "temperature.*greater than 0"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str):
    changes, message = CASES[name]
    if isinstance(changes.get("signal"), list):
        plain = {"source": POLICY, "signal": changes["signal"], "objective": CLIP, "budget": {"max_steps": 1}}
        with pytest.raises(RecipeError, match=message):
            Recipe.from_plain(plain)
        return
    with pytest.raises(RecipeError, match=message):
        make(**changes)


def test_allowed():
    assert make()
    assert make(signal={**REWARD, "advantage": "none"}, source={**POLICY, "group_size": 1})
    rejection = {**POLICY, "kind": "rejection", "verifier": "answer", "top_p": 0.9, "group_size": 1}
    assert make(source=rejection, signal="gold", objective=["nll"]), "cut samples may be imitated"
