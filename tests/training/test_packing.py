"""Packing and micro-batching: nothing lost, nothing seen across sequences, the same on every rank."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from statewise.errors import DataError
from statewise.testing import rollouts
from statewise.training.learner import Learner
from statewise.training.packing import collate, micro_batches, model_inputs, pack
from statewise.types import AUTHOR_CODE, PADDING, Example, Rollout, Segment
from tests.models.test_families import build

FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma2", "Gemma3Text", "Phi", "Phi3", "Granite", "Cohere"]


def sequence(name: str, size: int, **changes: object) -> Rollout:
    ids = tuple(2 + (7 * i + size) % 20 for i in range(size))
    return Rollout((Segment(ids[:1], "prompt"), Segment(ids[1:], "dataset", True)), Example(id=name), **changes)


def test_collate_layout():
    batch = collate([sequence("a", 3), sequence("b", 5)], pad_id=9)
    assert batch.tokens_BT.shape == (2, 5) and batch.tokens_BT[0, 3:].tolist() == [9, 9]
    assert batch.action_mask_BT.tolist() == [[False, True, True, False, False], [False, True, True, True, True]]
    assert batch.author_BT[0].tolist() == [AUTHOR_CODE["prompt"], *[AUTHOR_CODE["dataset"]] * 2, PADDING, PADDING]
    assert batch.sequence_BT[0].tolist() == [0, 0, 0, PADDING, PADDING]
    assert batch.position_BT[1].tolist() == [0, 1, 2, 3, 4]


def test_a_first_token_is_never_an_action():
    all_trained = Rollout((Segment((5, 6, 7), "dataset", True),), Example(id="text"))
    assert collate([all_trained], 0).action_mask_BT.tolist() == [[False, True, True]]
    packed = pack([all_trained, all_trained], 8, 0)
    assert packed.action_mask_BT.tolist() == [[False, True, True, False, True, True, False, False]]
    assert packed.position_BT.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]]


def logprobs(learner: Learner, batches: list) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {}
    for batch in batches:
        stats = learner(batch, mode="stats")
        for index, name in enumerate(batch.example_ids):
            out[name] = stats.logprobs[batch.sequence_BT == index].tolist()
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_unpacked(family: str):
    learner = Learner(build(family), [])
    plain = logprobs(learner, micro_batches(rollouts(), pad_id=0, max_rows=1))
    packed = micro_batches(rollouts(), pad_id=0, pack_length=24)
    assert sum(b.tokens_BT.shape[0] for b in packed) < len(plain)
    for name, values in logprobs(learner, packed).items():
        assert values == pytest.approx(plain[name], rel=1e-6, abs=1e-6), (family, name)
    padded = logprobs(learner, micro_batches(rollouts(), pad_id=0))
    for name, values in padded.items():
        assert values == pytest.approx(plain[name], rel=1e-6, abs=1e-6), (family, name)


def test_a_packed_neighbour_is_not_seen():
    learner = Learner(build("Llama"), [])
    first, second = sequence("a", 6), sequence("b", 7)
    other = Rollout((Segment((3, 3, 3), "prompt"), Segment((4, 4, 4), "dataset", True)), Example(id="a"))
    before = logprobs(learner, [pack([first, second], 16, 0)])["b"]
    assert logprobs(learner, [pack([other, second], 16, 0)])["b"] == pytest.approx(before, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 30), min_size=1, max_size=20),
    max_tokens=st.one_of(st.none(), st.integers(20, 90)),
    max_rows=st.one_of(st.none(), st.integers(1, 5)),
    pack_length=st.one_of(st.none(), st.integers(30, 64)),
    num_ranks=st.integers(1, 3),
)
def test_every_rollout_is_somewhere_once(sizes, max_tokens, max_rows, pack_length, num_ranks):
    given_rollouts = [sequence(f"s{i}", n) for i, n in enumerate(sizes)]
    by_rank = [
        micro_batches(
            given_rollouts,
            pad_id=0,
            max_tokens=max_tokens,
            max_rows=max_rows,
            pack_length=pack_length,
            num_ranks=num_ranks,
            rank=rank,
        )
        for rank in range(num_ranks)
    ]
    assert len({len(batches) for batches in by_rank}) == 1
    flat = [b for batches in by_rank for b in batches]
    assert sorted(n for b in flat for n in b.example_ids if n) == sorted(r.example.id for r in given_rollouts)
    assert sum(int(b.action_mask_BT.sum()) for b in flat) == sum(r.num_action_tokens for r in given_rollouts)
    for batch in flat:
        rows, width = batch.tokens_BT.shape
        assert max_rows is None or rows <= max_rows
        assert max_tokens is None or rows * width <= max_tokens or rows == 1
        for index, name in enumerate(batch.example_ids):
            if name:
                own = next(r for r in given_rollouts if r.example.id == name)
                assert batch.tokens_BT[batch.sequence_BT == index].tolist() == own.tokens()


def test_columns_logprobs_and_rewards_follow_their_tokens():
    segments = (Segment((5, 6), "prompt"), Segment((7, 8), "policy", True, logprobs=(-0.5, -1.5)))
    one = Rollout(segments, Example(id="one"), group=3, reward=2.0).with_columns(advantages=[0.0, 0.0, 1.0, -1.0])
    batch = collate([one], 0)
    assert batch.column("behavior_logprobs").tolist() == [[0.0, 0.0, -0.5, -1.5]]
    assert batch.column("rewards").tolist() == [[2.0] * 4]
    assert batch.column("advantages").tolist() == [[0.0, 0.0, 1.0, -1.0]]
    assert batch.group_S.tolist() == [3]
    without = Rollout(segments, Example(id="two"), reward=1.0)
    with pytest.raises(DataError, match="two"):
        collate([one, without], 0)


def test_a_sequence_that_does_not_fit_is_named():
    with pytest.raises(DataError, match=r"'long' has 40 tokens .* batch\.pack = 32"):
        micro_batches([sequence("long", 40)], pad_id=0, pack_length=32)


def test_model_inputs_of_padded_rows_mask_the_padding():
    inputs = model_inputs(collate([sequence("a", 2), sequence("b", 4)], 0))
    assert inputs["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert torch.equal(inputs["input_ids"][1], torch.tensor(sequence("b", 4).tokens()))
