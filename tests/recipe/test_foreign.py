"""What settings of other trainers are called here."""

import re

import pytest

from statewise import Recipe
from statewise.cli.words import split_words
from statewise.component import kinds
from statewise.errors import RecipeError, nearest
from statewise.foreign import NAMES, here

PLAIN = {
    "source": {"kind": "dataset", "data": "tiny:math"},
    "signal": ["gold"],
    "objective": ["nll"],
    "budget": {"max_steps": 1},
}


def of_kinds(role: str) -> set[str]:
    return {field for cls in kinds(role).values() for field in cls.model_fields}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_name_here_is_one(name: str) -> None:
    key = re.split(r"[ ,=(]", NAMES[name])[0]
    if key.startswith("--"):
        assert key in ("--out", "--resume", "--track")
        return
    first, *rest = key.split(".")
    inside = {"source": of_kinds("source"), "signal": of_kinds("signal") | {"0"}, "objective": of_kinds("loss")}
    if first in inside:
        assert rest[-1] == "loss" or rest[-1] in inside[first]
        return
    fields = Recipe.model_fields
    for part in key.split(".")[:-1]:
        inner = fields[part].annotation
        fields = next(t for t in [inner, *getattr(inner, "__args__", ())] if hasattr(t, "model_fields")).model_fields
    assert key.split(".")[-1] in fields


def test_it_is_said_wherever_a_key_is_unknown() -> None:
    assert here("--learning-rate") == "; learning_rate is optim.lr here." and here("colour") == ""
    with pytest.raises(RecipeError, match=r"learning_rate is optim\.lr here"):
        Recipe.from_plain(PLAIN, ["optim.learning_rate=1"])
    with pytest.raises(RecipeError, match=r"num_generations is source\.group_size here"):
        Recipe.from_plain(PLAIN, ["num_generations=8"])
    with pytest.raises(RecipeError, match=r"num_train_epochs is budget\.max_epochs here"):
        split_words(["tiny_sft", "--num_train_epochs", "2"])


def test_a_part_of_a_name_is_enough_for_a_hint() -> None:
    assert nearest("sft", ["dpo", "hinted_sft", "tiny_sft"]) == "; did you mean 'tiny_sft'?"


def test_own_data_in_a_shipped_recipe() -> None:
    """What only embedded data has goes with it, unless it was asked for; other embedded data keeps it."""
    recipe = Recipe.load("dpo", ["source.data=pairs.jsonl"])
    assert recipe.source.data == "pairs.jsonl" and recipe.source.count is None
    assert Recipe.load("dpo", ["source.data=tiny:math_pairs"]).source.count == 1000
    with pytest.raises(RecipeError, match=r"source\.count: belongs to embedded data"):
        Recipe.load("dpo", ["source.count=3", "source.data=pairs.jsonl"])


def test_a_verifier_by_its_file_and_name() -> None:
    plain = {"source": {"kind": "policy", "data": "rows.jsonl"}, "objective": ["clip"], "budget": {"max_steps": 1}}
    signal = {"kind": "reward", "verifier": "own.py:score"}
    assert Recipe.from_plain({**plain, "signal": [signal]}).signal[0].verifier.call == "own.py:score"
    with pytest.raises(RecipeError, match=r"expected 'own\.py:NAME'"):
        Recipe.from_plain({**plain, "signal": [{**signal, "verifier": "own.py"}]})
