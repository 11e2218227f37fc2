"""Packing and micro-batching: nothing lost, nothing seen across sequences, the same on every rank."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.test_families import build

from statewise.errors import DataError, RecipeError
from statewise.objective import Term
from statewise.testing import rollouts
from statewise.training.learner import Learner
from statewise.training.packing import check_packing, collate, micro_batches, model_inputs, pack
from statewise.types import AUTHOR_CODE, PADDING, Batch, Example, Rollout, Segment

FAMILIES = [
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Qwen3Moe",
    "Gemma2",
    "Gemma3Text",
    "Phi",
    "Phi3",
    "Granite",
    "Cohere",
]


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
    packed = pack([all_trained, all_trained, sequence("b", 8)], 8, 9)
    assert packed.action_mask_BT[1].tolist() == [False, True, True, False, True, True, False, False]
    assert packed.position_BT[1].tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    assert packed.sequence_BT[1].tolist() == [1, 1, 1, 2, 2, 2, PADDING, PADDING]
    assert packed.example_ids == ("b", "text", "text") and packed.tokens_BT[1, 6:].tolist() == [9, 9]


def logprobs(learner: Learner, batches: list[Batch]) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {}
    for batch in batches:
        stats = learner(batch, mode="stats")
        for index, name in enumerate(batch.example_ids):
            out[name] = stats.logprobs[batch.sequence_BT == index].tolist()
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_unpacked(family: str):
    learner = Learner(build(family), [])
    check_packing(learner.model, one_row=False)
    plain = logprobs(learner, micro_batches(rollouts(), pad_id=0, max_rows=1))
    packed = micro_batches(rollouts(), pad_id=0, pack_length=24)
    assert sum(b.tokens_BT.shape[0] for b in packed) < len(plain)
    for values in (logprobs(learner, packed), logprobs(learner, micro_batches(rollouts(), pad_id=0))):
        assert values.keys() == plain.keys()
        for name in plain:
            assert values[name] == pytest.approx(plain[name], rel=1e-6, abs=1e-6), (family, name)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3", "Gemma3Text"])
def test_packed_equals_unpacked_in_float64(family: str):
    """With a sliding window shorter than the sequences, where the family has one."""
    learner = Learner(build(family).double(), [])
    given_rollouts = [sequence("a", 14), sequence("b", 9), sequence("c", 6), sequence("d", 11)]
    plain = logprobs(learner, micro_batches(given_rollouts, pad_id=0, max_rows=1))
    packed = logprobs(learner, [pack(given_rollouts, 24, 0)])
    for name, values in plain.items():
        assert packed[name] == pytest.approx(values, rel=1e-12, abs=1e-12), (family, name)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3", "Gemma3Text"])
def test_a_packed_neighbour_is_not_seen(family: str):
    learner = Learner(build(family).double(), [])
    first, second = sequence("a", 6), sequence("b", 5)
    other = Rollout((Segment((3, 3, 3), "prompt"), Segment((4, 4, 4), "dataset", True)), Example(id="a"))
    before, after = (logprobs(learner, [pack([x, second], 16, 0)]) for x in (first, other))
    assert after["b"] == pytest.approx(before["b"], abs=1e-12)
    assert max(abs(x - y) for x, y in zip(before["a"], after["a"], strict=True)) > 1e-2  # the neighbour did change


def test_a_model_that_mixes_packed_sequences_is_refused():
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=48, hidden_size=16, state_size=4, num_hidden_layers=2)
    torch.manual_seed(0)
    with pytest.raises(RecipeError, match=r"see each other in a 'mamba' model .* Unset batch\.pack"):
        check_packing(MambaForCausalLM(config), one_row=True)


def test_flash_attention_packs_single_rows_only():
    model = build("Llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(RecipeError, match=r"set batch\.micro_rows = 1"):
        check_packing(model, one_row=False)


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


def test_segment_logprobs_are_a_column_only_where_every_rollout_has_them():
    sampled = Rollout((Segment((5,), "prompt"), Segment((7,), "policy", True, logprobs=(-0.5,))), Example(id="one"))
    assert list(collate([sampled, sequence("gold", 3)], 0).columns) == []
    annotated = sequence("gold", 3).with_columns(behavior_logprobs=[0.0, -1.0, -2.0])
    batch = collate([sampled, annotated], 0)
    assert batch.column("behavior_logprobs").tolist() == [[0.0, -0.5, 0.0], [0.0, -1.0, -2.0]]


def test_a_sequence_longer_than_a_packed_row_gets_its_own():
    batch = pack([sequence("short", 3), sequence("long", 40), sequence("other", 4)], 32, 0)
    assert batch.example_ids == ("long", "other", "short") and batch.tokens_BT.shape == (2, 40)


def test_a_rank_without_rollouts_gets_a_batch_without_actions():
    one = sequence("a", 4).with_columns(advantages=[0.0, 1.0, 1.0, 1.0])
    learner = Learner(build("Llama"), [Term(loss="nll")])
    first, second = (micro_batches([one], pad_id=0, num_ranks=2, rank=r) for r in range(2))
    assert len(first) == len(second) == 1 and first[0].example_ids == ("a",)
    assert second[0].example_ids == ("",) and int(second[0].action_mask_BT.sum()) == 0
    assert second[0].columns.keys() == first[0].columns.keys()
    loss = learner(second[0], [3.0])["loss"]
    loss.backward()  # data-parallel wrappers wait for every rank's backward
    assert float(loss.detach()) == 0.0
    assert all(float(p.grad.abs().max()) == 0 for p in learner.parameters() if p.grad is not None)


def test_shares_of_the_ranks_are_of_nearly_equal_size():
    given_rollouts = [sequence(f"s{i}", 5 + i) for i in range(16)]
    sizes = [
        sum(int((b.sequence_BT >= 0).sum()) for b in micro_batches(given_rollouts, pad_id=0, num_ranks=4, rank=r))
        for r in range(4)
    ]
    assert max(sizes) - min(sizes) <= 2


def test_nothing_makes_no_batch():
    assert micro_batches([], pad_id=0, num_ranks=2, rank=1) == []


def test_model_inputs():
    padded = model_inputs(collate([sequence("a", 2), sequence("b", 4)], 0))
    assert padded["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert torch.equal(padded["input_ids"][1], torch.tensor(sequence("b", 4).tokens()))
    packed = model_inputs(pack([sequence("a", 2), sequence("b", 4)], 8, 0))
    assert packed["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1]] and "attention_mask" not in packed
