"""Pairs: TRL's preference formats as groups of two rollouts, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from statewise.component import parse
from statewise.errors import DataError, RecipeError
from statewise.recipe import Recipe
from statewise.tiny.tokenizer import train_tokenizer
from statewise.types import Rollout, World

USER, GOOD, BAD = "What is 2 + 2?", "It is 4.", "It is five."
QUESTION, RIGHT, WRONG = (
    [{"role": r, "content": t}] for r, t in (("user", USER), ("assistant", GOOD), ("assistant", BAD))
)
EARLIER = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello."}]
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"prompt": QUESTION, "chosen": RIGHT, "rejected": WRONG},
    "conversations with the same beginning": {"chosen": QUESTION + RIGHT, "rejected": QUESTION + WRONG},
    "conversations beside the prompt as text": {
        "prompt": USER,
        "chosen": QUESTION + RIGHT,
        "rejected": QUESTION + WRONG,
    },
    "a prompt as text with answers as messages": {"prompt": USER, "chosen": RIGHT, "rejected": WRONG},
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([f"{USER} {GOOD} {BAD} Hello."] * 20, 300, 256)


def sampled(tokenizer: Any, path: Path, rows: list[dict[str, Any]], **settings: Any) -> list[Rollout]:
    (path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source: Any = parse("source", {"kind": "pairs", "data": "pairs.jsonl", "shuffle": False, **settings}, "source")
    return source.sample(0, 2 * len(rows), World(tokenizer=tokenizer, seed=0, base_dir=path))


def text(tokenizer: Any, rollout: Rollout, train: bool) -> str:
    return "".join(tokenizer.decode(list(s.tokens)) for s in rollout.segments if s.train is train)


@pytest.mark.parametrize("name", ROWS)
def test_every_format_gives_the_same_pair(name: str, tokenizer: Any, tmp_path: Path):
    chosen, rejected = sampled(tokenizer, tmp_path, [ROWS[name]])
    assert (chosen.reward, rejected.reward) == (1.0, 0.0) and chosen.group == rejected.group
    assert text(tokenizer, chosen, True) == f"{GOOD}{tokenizer.eos_token}"
    assert text(tokenizer, rejected, True) == f"{BAD}{tokenizer.eos_token}"
    assert chosen.segments[0] == rejected.segments[0]
    assert chosen.example.id == rejected.example.id


def test_text(tokenizer: Any, tmp_path: Path):
    chosen, rejected = sampled(tokenizer, tmp_path, [{"prompt": USER, "chosen": f" {GOOD}", "rejected": f" {BAD}"}])
    assert text(tokenizer, chosen, False) == USER == text(tokenizer, rejected, False)
    assert text(tokenizer, chosen, True) == f" {GOOD}{tokenizer.eos_token}"


def test_turns_before_the_answers_are_not_trained(tokenizer: Any, tmp_path: Path):
    row = {"chosen": EARLIER + QUESTION + RIGHT, "rejected": EARLIER + QUESTION + WRONG}
    chosen, _ = sampled(tokenizer, tmp_path, [row])
    assert text(tokenizer, chosen, True) == f"{GOOD}{tokenizer.eos_token}"
    assert "Hello." in text(tokenizer, chosen, False)


def test_groups_columns_and_removal(tokenizer: Any, tmp_path: Path):
    rows = [{"id": n, "q": USER, "good": f"{GOOD}<<x>>", "bad": BAD} for n in ("a", "b", "c")]
    columns = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    out = sampled(tokenizer, tmp_path, rows, columns=columns, remove=["<<[^>]*>>"], chat=True)
    assert [(r.group, r.reward, r.example.id) for r in out] == [
        (g, w, n) for g, n in enumerate("abc") for w in (1.0, 0.0)
    ]
    assert text(tokenizer, out[0], True) == f"{GOOD}{tokenizer.eos_token}"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one answer": ({"prompt": USER, "chosen": GOOD}, r"pairs\.jsonl:1: rejected: is missing"),
    "the same": ({"prompt": USER, "chosen": GOOD, "rejected": GOOD}, "are the same tokens"),
    "no prompt": ({"chosen": GOOD, "rejected": BAD}, "prompt: is missing"),
    "other prompts": ({"chosen": QUESTION + RIGHT, "rejected": EARLIER[:1] + WRONG}, "the same beginning"),
    "one is the beginning of the other": ({"chosen": QUESTION + RIGHT, "rejected": QUESTION}, "the same beginning"),
    "empty": ({"prompt": USER, "chosen": GOOD, "rejected": " "}, "rejected: is empty"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_rows(name: str, tokenizer: Any, tmp_path: Path):
    row, message = REFUSED[name]
    with pytest.raises(DataError, match=message):
        sampled(tokenizer, tmp_path, [row])


def test_a_pair_is_dropped_whole(tokenizer: Any, tmp_path: Path):
    rows = [{"prompt": USER, "chosen": GOOD, "rejected": BAD * 20}, {"prompt": USER, "chosen": GOOD, "rejected": BAD}]
    out = sampled(tokenizer, tmp_path, rows, max_length=60, too_long="drop")
    assert len(out) == 4 and {len(r.tokens()) < 60 for r in out} == {True}


def test_an_odd_number_of_rollouts_is_refused(tokenizer: Any):
    source: Any = parse("source", {"kind": "pairs", "data": "tiny:math_pairs", "count": 4}, "source")
    world = World(tokenizer=tokenizer, seed=0)
    assert source.num_examples(world) == 8
    with pytest.raises(RecipeError, match="received 3 rollouts for a step, expected a multiple of 2"):
        source.sample(0, 3, world)


def recipe(**changes: Any) -> Recipe:
    plain = {
        "source": {"kind": "pairs", "data": "tiny:math_pairs"},
        "signal": ["preference", "reference"],
        "objective": [{"loss": "dpo", "reduce": "group_mean"}],
        "budget": {"max_steps": 1},
    }
    return Recipe.from_plain({**plain, **changes})


def test_recipes_without_a_meaning_are_refused():
    assert recipe().objective[0].loss.kind == "dpo"
    with pytest.raises(RecipeError, match=r"'dpo' reads 'reference_logprobs'.* Add signal 'reference'"):
        recipe(signal=["preference"])
    with pytest.raises(RecipeError, match=r"'preference' reads 'rewards'.*source 'pairs'"):
        recipe(source={"kind": "dataset", "data": "tiny:math"})
    with pytest.raises(RecipeError, match=r"'dpo' reads 'preferences'.* Add signal 'preference'"):
        recipe(signal=["reference"])
    with pytest.raises(RecipeError, match="a loss of whole groups; it takes reduce = 'group_mean'"):
        recipe(objective=[{"loss": "dpo", "reduce": "token_mean"}])
    with pytest.raises(RecipeError, match="'gold', which nothing in this recipe writes"):
        recipe(objective=["nll"])
    with pytest.raises(RecipeError, match="'group_mean' is for losses that compare the rollouts of a group"):
        recipe(
            source={"kind": "dataset", "data": "tiny:math"},
            signal=["gold"],
            objective=[{"loss": "nll", "reduce": "group_mean"}],
        )
