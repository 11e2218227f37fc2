"""Reductions as factors, denominators over any split, and what a selector's compensation does to both."""

from statistics import fmean

import pytest
import torch

from statewise.component import parse
from statewise.objective import Term, counts, denominators, factors
from statewise.testing import rollouts
from statewise.training.packing import micro_batches


def term(**settings: object) -> Term:
    return Term(**{"loss": "nll", **settings})


def values(batch) -> torch.Tensor:
    """Any number a token that depends on the token alone."""
    return batch.tokens_BT.double().sqrt() + batch.position_BT


def by_hand(reduce: str) -> float:
    """The reduction from its definition, sequence by sequence."""
    sequences = []
    for rollout in rollouts():
        trained = [s.train for s in rollout.segments for _ in s.tokens]
        sequences.append([t**0.5 + i for i, (t, on) in enumerate(zip(rollout.tokens(), trained, strict=True)) if on])
    flat = [v for s in sequences for v in s]
    return {
        "token_mean": fmean(flat),
        "sequence_mean": sum(flat) / len(sequences),
        "sequence_mean_token_mean": fmean(fmean(s) for s in sequences),
        "fixed_length": sum(flat) / (len(sequences) * 20),
    }[reduce]


@pytest.mark.parametrize("how", [{}, {"max_rows": 1}, {"max_rows": 4}, {"pack_length": 24}])
@pytest.mark.parametrize("reduce", ["token_mean", "sequence_mean", "sequence_mean_token_mean", "fixed_length"])
def test_reductions_equal_their_definition_for_any_split(reduce: str, how: dict):
    t = term(reduce=reduce, coef=2.0, length=20 if reduce == "fixed_length" else None)
    batches = micro_batches(rollouts(), pad_id=0, **how)
    shares = denominators([t], batches)
    got = sum(float((factors(t, b, shares[0]).double() * values(b)).sum()) for b in batches)
    assert got == pytest.approx(2.0 * by_hand(reduce), rel=1e-6)


def test_mean_of_micro_batch_means_is_another_number():
    """The fault that global denominators prevent must show on this data, or the test above would prove nothing."""
    t, batches = term(), micro_batches(rollouts(), pad_id=0, max_rows=1)
    wrong = fmean(float((factors(t, b, counts(t, b)).double() * values(b)).sum()) for b in batches)
    assert abs(wrong - by_hand("token_mean")) > 0.1


def test_compensated_share_keeps_the_scale():
    batch = micro_batches(rollouts(), pad_id=0)[0]
    chosen = parse("selector", {"kind": "random", "share": 0.5}, "on")(batch)
    kept, all_tokens = (chosen != 0).sum(1), batch.action_mask_BT.sum(1)
    assert (kept == (all_tokens + 1) // 2).all()
    assert torch.allclose(chosen.sum(1), all_tokens.float())
    plain = parse("selector", {"kind": "random", "share": 0.5, "compensate": False}, "on")(batch)
    assert set(plain.unique().tolist()) == {0.0, 1.0} and ((plain != 0) == (chosen != 0)).all()


def test_author_and_position_selectors():
    batch = micro_batches(rollouts(), pad_id=0)[0]
    total = sum(
        parse("selector", {"kind": "author", "author": a}, "on")(batch) for a in ("dataset", "policy", "teacher")
    )
    assert torch.equal(total, batch.action_mask_BT.float())
    first = parse("selector", {"kind": "position", "stop": 1}, "on")(batch)
    assert (first.sum(1) == 1).all()
    rest = parse("selector", {"kind": "position", "start": 1}, "on")(batch)
    assert torch.equal(first + rest, batch.action_mask_BT.float())


def test_a_random_share_does_not_depend_on_the_batch():
    selector = parse("selector", {"kind": "random", "share": 0.4}, "on")
    together = micro_batches(rollouts(), pad_id=0)[0]
    alone = {b.example_ids[0]: b for b in micro_batches(rollouts(), pad_id=0, max_rows=1)}
    for row, name in enumerate(together.example_ids):
        width = alone[name].tokens_BT.shape[1]
        assert torch.equal(selector(together)[row, :width], selector(alone[name])[0])


@pytest.mark.parametrize(("loss", "reduce"), [("dpo", "group_mean"), ("gspo", "sequence_mean"), ("nll", "token_mean")])
def test_a_loss_of_whole_sequences_or_groups_brings_its_reduction(loss: str, reduce: str):
    assert Term(loss=loss).reduce == Term(loss={"kind": loss}).reduce == reduce
    assert Term(loss=loss) == Term(loss=loss, reduce=reduce)
