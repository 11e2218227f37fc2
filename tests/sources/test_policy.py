"""The policy as a source: groups, seeds, ranks, truncation, prompts of every format, rejection."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.training.conftest import model_dir  # noqa: F401 - a fixture

from statewise.component import Source, parse
from statewise.errors import DataError, RecipeError
from statewise.files import to_json
from statewise.models.generate import InProcessSampler
from statewise.models.load import load_policy
from statewise.types import Completion, Rollout, Sampling, World

SMALL = {"data": "tiny:math", "count": 10, "group_size": 3, "max_tokens": 12}


def source(kind: str = "policy", **settings: Any) -> Source:
    return parse("source", {"kind": kind, **SMALL, **settings}, "source")  # type: ignore[return-value]


@pytest.fixture(scope="module")
def world(model_dir: Path) -> World:  # noqa: F811
    policy = load_policy(str(model_dir))
    return World(policy.tokenizer, 0, policy.model, InProcessSampler(policy.model, pad_id=policy.pad_id))


class Scripted:
    """A sampler that writes what `write(prompt, row, seed)` says."""

    def __init__(self, write: Callable[[Sequence[int], int, int], Completion]):
        self.write = write
        self.calls: list[tuple[list[int], Sampling]] = []

    def load(self, policy: Any) -> None: ...

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, rows: Sequence[int] | None = None
    ) -> list[Completion]:
        assert rows is not None
        self.calls.append((list(rows), sampling))
        return [self.write(p, row, sampling.seed) for p, row in zip(prompts, rows, strict=True)]


def completion(*tokens: int, reason: str = "stop") -> Completion:
    return Completion(tokens, tuple(-0.5 for _ in tokens), reason)  # type: ignore[arg-type]


def ids(rollouts: list[Rollout]) -> list[list[int]]:
    return [r.tokens() for r in rollouts]


def test_groups_carry_what_a_loss_needs(world: World):
    reported: dict[str, float] = {}
    rollouts = source(temperature=0.7).sample(4, 6, replace(world, step=3, report=reported.update))
    assert [r.group for r in rollouts] == [0, 0, 0, 1, 1, 1]
    assert len({r.example.id for r in rollouts[:3]}) == 1 and rollouts[0].example.id != rollouts[3].example.id
    for rollout in rollouts:
        prompt, own = rollout.segments
        assert (prompt.author, prompt.train, own.author, own.train) == ("prompt", False, "policy", True)
        assert own.policy_version == 3 and own.logprobs is not None and len(own.logprobs) == len(own.tokens)
        assert own.tokens[-1] == world.tokenizer.eos_token_id or len(own.tokens) == 12
        assert rollout.example.answer.isdigit() and rollout.example.messages[0]["role"] == "user"
    lengths = [len(r.segments[1].tokens) for r in rollouts]
    assert reported["completion_tokens"] == sum(lengths) / 6 and reported["completion_tokens_max"] == max(lengths)


def test_samples_are_a_function_of_seed_and_step(world: World):
    draw = source()
    again = ids(draw.sample(1, 6, world))
    assert ids(draw.sample(1, 6, world)) == again
    assert ids(draw.sample(2, 6, world)) != again
    assert ids(draw.sample(1, 6, replace(world, seed=1))) != again


def test_an_epoch_sees_every_prompt_once(world: World):
    scripted = replace(world, sampler=Scripted(lambda p, row, seed: completion(7)))
    draw = source()
    seen = [r.example.id for step in range(5) for r in draw.sample(step, 6, scripted)]
    assert len(set(seen)) == 10 and all(seen.count(name) == 3 for name in seen)
    assert draw.num_examples(world) == 30


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_ranks_share_the_work_and_draw_the_same(num_ranks: int, world: World):
    """Each rank's part, gathered, is what one process draws."""
    whole = ids(source().sample(0, 12, world))
    parts: list[list[Any]] = []

    def collect(rank: int) -> None:
        def gather(own: list[Any]) -> list[Any]:
            parts.append(own)
            raise StopIteration

        with pytest.raises(StopIteration):
            source().sample(0, 12, replace(world, rank=rank, num_ranks=num_ranks, gather=gather))

    for rank in range(num_ranks):
        collect(rank)
    joined = [item for part in parts for item in part]
    own = replace(world, num_ranks=num_ranks, gather=lambda items: joined)
    assert ids(source().sample(0, 12, own)) == whole


@pytest.mark.parametrize(("truncated", "trained"), [("keep", [True] * 3), ("mask", [True, False, True])])
def test_truncated_completions(truncated: str, trained: list[bool], world: World):
    sampler = Scripted(
        lambda p, row, seed: completion(*[7] * (5 if row == 1 else 2), reason="length" if row == 1 else "stop")
    )
    reported: dict[str, float] = {}
    fixed = replace(world, sampler=sampler, report=reported.update)
    rollouts = source(truncated=truncated).sample(0, 3, fixed)
    assert [r.segments[1].train for r in rollouts] == trained
    assert [r.stop_reason for r in rollouts] == ["stop", "length", "stop"]
    assert reported["truncated_share"] == pytest.approx(1 / 3) and reported["num_resampled"] == 0
    assert (reported["completion_tokens"], reported["completion_tokens_max"]) == (3, 5), "masked ones count"


def test_resampling_draws_again_from_new_streams_and_gives_up(world: World):
    def write(prompt: Sequence[int], row: int, seed: int) -> Completion:
        tried = len(sampler.calls)
        ends = row == 0 or (row == 1 and tried == 3)  # row 1 ends at its third draw, row 2 never
        return completion(7 + tried, reason="stop" if ends else "length")

    sampler = Scripted(write)
    reported: dict[str, float] = {}
    fixed = replace(world, sampler=sampler, report=reported.update)
    rollouts = source(truncated="resample", tries=3).sample(0, 3, fixed)
    assert [rows for rows, _ in sampler.calls] == [[0, 1, 2], [1, 2], [1, 2], [2]]
    assert len({sampling.seed for _, sampling in sampler.calls}) == 4
    assert [r.segments[1].tokens[0] for r in rollouts] == [8, 10, 11]
    assert [r.segments[1].train for r in rollouts] == [True, True, False]
    assert reported["num_resampled"] == 2 + 3 and reported["truncated_share"] == pytest.approx(1 / 3)


def test_all_stop_ids_end_a_completion(world: World):
    before = world.policy.generation_config.eos_token_id
    sampler = Scripted(lambda p, row, seed: completion(7))
    try:
        world.policy.generation_config.eos_token_id = [5, 9]
        source().sample(0, 3, replace(world, sampler=sampler))
    finally:
        world.policy.generation_config.eos_token_id = before
    assert {5, 9, world.tokenizer.eos_token_id} == set(sampler.calls[0][1].stop_ids)


def test_part_of_a_group_is_refused(world: World):
    with pytest.raises(RecipeError, match="received 4 rollouts for a step, expected a multiple of group_size = 3"):
        source().sample(0, 4, world)


ROWS = {
    "text": ({"prompt": "2 + 2 =", "completion": " 4"}, {}, "2 + 2 =", " 4"),
    "an answer beside": ({"prompt": "2 + 2 =", "answer": "4"}, {}, "2 + 2 =", "4"),
    "other names": ({"q": "2 + 2 =", "a": "4"}, {"columns": {"prompt": "q", "answer": "a"}}, "2 + 2 =", "4"),
}


@pytest.mark.parametrize("name", ROWS)
def test_prompts_as_text(name: str, world: World, tmp_path: Path):
    row, settings, text, answer = ROWS[name]
    (tmp_path / "rows.jsonl").write_text(to_json(row) + "\n")
    made = source(data="rows.jsonl", count=None, **settings)
    (prompt,) = made.prompts(replace(world, base_dir=tmp_path))  # type: ignore[attr-defined]
    assert world.tokenizer.decode(list(prompt.tokens)) == text
    assert (prompt.example.text, prompt.example.answer) == (text, answer)


def test_prompts_as_conversations(world: World, tmp_path: Path):
    turns = [{"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": "4"}]
    (tmp_path / "rows.jsonl").write_text(to_json({"messages": turns}) + "\n")
    made = source(data="rows.jsonl", count=None, system="Be short.")
    (prompt,) = made.prompts(replace(world, base_dir=tmp_path))  # type: ignore[attr-defined]
    asked = [{"role": "system", "content": "Be short."}, turns[0]]
    expected = world.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert list(prompt.tokens) == expected
    assert (list(prompt.example.messages), prompt.example.answer) == (asked, "4")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a story"}, "neither prompt nor messages"),
        ({"prompt": ""}, "prompt: is empty"),
        ({"messages": [{"role": "assistant", "content": "4"}]}, "an answer and no question"),
    ],
)
def test_rows_without_a_question(row: dict, message: str, world: World, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text(to_json(row) + "\n")
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: .*{message}"):
        source(data="rows.jsonl", count=None).num_examples(replace(world, base_dir=tmp_path))


# --- rejection --------------------------------------------------------------------------------------------------------

SCORES = """
def score(text, example):
    return {"a": 1.0, "b": 2.0, "c": 0.5}.get(text[:1], 0.0)
"""


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, ["a", "b", "a"]),
        ({"deduplicate": False}, ["a", "a", "b", "a"]),
        ({"keep": "best"}, ["b", "a"]),
        ({"threshold": 0.5}, ["a", "b", "c", "a"]),
        ({"threshold": 3.0}, []),
    ],
)
def test_what_is_kept(settings: dict, kept: list[str], world: World, tmp_path: Path):
    (tmp_path / "mine.py").write_text(SCORES)
    letters = [world.tokenizer.encode(c, add_special_tokens=False)[0] for c in "aabca"]
    cut = completion(letters[0], reason="length")
    written = [*(completion(t) for t in letters), cut]
    reported: dict[str, float] = {}
    fixed = replace(
        world, base_dir=tmp_path, report=reported.update, sampler=Scripted(lambda p, row, seed: written[row])
    )
    verifier = {"kind": "function", "call": "mine.py:score"}
    rollouts = source("rejection", verifier=verifier, **settings).sample(0, 6, fixed)
    assert [world.tokenizer.decode(list(r.segments[1].tokens)) for r in rollouts] == kept
    assert reported["num_kept"] == len(kept)
    if not settings:
        assert reported["accepted_share"] == pytest.approx(4 / 6) and reported["solved_share"] == 1.0


def test_the_verifier_of_a_rejection_source_is_tested(world: World):
    draw = source("rejection", verifier={"kind": "regex", "pattern": "(x)", "sample": "{answer}"})
    with pytest.raises(RecipeError, match=r"source\.verifier: 'regex' gives 0"):
        draw.before_training(draw, world)
    source("rejection", verifier="answer").before_training(draw, world)
