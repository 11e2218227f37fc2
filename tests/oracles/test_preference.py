"""DPO, IPO and SimPO in float64: closed forms, gradients through the learner, TRL's own code on the same tensors.

Every oracle is a function of the implementation, and wrong implementations (sign, missing reference, a mean in place of a
sum, a misplaced beta or gamma) must be rejected by it.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from statewise.component import parse
from statewise.losses import preference
from statewise.objective import Term, denominators
from statewise.testing import tiny_learner
from statewise.training.packing import micro_batches
from statewise.types import Batch, Example, Rollout, Segment, TokenStats

# log pi and log pi_ref of two pairs: (chosen, rejected), of different lengths.
POLICY = [([-0.5, -1.0, -0.25], [-2.0, -0.5]), ([-1.5], [-0.25, -0.25, -0.5, -1.0])]
REFERENCE = [([-0.75, -1.5, -0.5], [-1.0, -0.5]), ([-1.0], [-0.5, -0.5, -0.25, -1.25])]
# Margins of sums of log pi / pi_ref: (1.0 - (-1.0)), (-0.5 - 0.5); of means: (1/3 + 0.5), (-0.5 - 0.125);
# of means of log pi: (-1.75/3 + 1.25), (-1.5 + 0.5).
MARGINS = {"dpo": [2.0, -1.0], "ipo": [1 / 3 + 0.5, -0.625], "simpo": [-1.75 / 3 + 1.25, -1.0]}

Value = Callable[[dict[str, Any], TokenStats, Batch], torch.Tensor]


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def pairs() -> list[Rollout]:
    """The rollouts of POLICY, in an order that packing and sorting by length must not depend on."""
    out = []
    for group, (ours, reference) in enumerate(zip(POLICY, REFERENCE, strict=True)):
        for sign, own, other in zip((1.0, -1.0), ours, reference, strict=True):
            ids = tuple(2 + (5 * i + group + int(sign)) % 20 for i in range(len(own)))
            segments = (Segment((3, 4 + group), "prompt"), Segment(ids, "dataset", True))
            rollout = Rollout(segments, Example(f"{group}{sign}"), group=group + 7)
            out.append(
                rollout.with_columns(
                    preferences=[sign] * rollout.num_tokens,
                    reference_logprobs=[0.0, 0.0, *other],
                    policy=[0.0, 0.0, *own],
                )
            )
    return out


def batch_of(rollouts: list[Rollout], **how: Any) -> tuple[TokenStats, Batch]:
    (batch,) = micro_batches(rollouts, pad_id=0, keep_groups=True, **how)
    logprobs = batch.column("policy").double().requires_grad_()
    return TokenStats(logprobs), batch


def ours(settings: dict[str, Any], stats: TokenStats, batch: Batch) -> torch.Tensor:
    loss: Any = parse("loss", settings, "loss")
    return loss(stats, batch)


# --- values -----------------------------------------------------------------------------------------------------------


def value_oracle(value: Value) -> None:
    """Losses of both pairs from their margins, with numbers written out."""
    stats, batch = batch_of(pairs())
    expected = {
        "dpo": [softplus(-0.5 * m) for m in MARGINS["dpo"]],
        "ipo": [(m - 1.0) ** 2 for m in MARGINS["ipo"]],
        "simpo": [softplus(-(0.5 * m - 0.75)) for m in MARGINS["simpo"]],
    }
    assert expected["dpo"] == pytest.approx([0.3132616875, 0.9740769842])
    assert expected["ipo"] == pytest.approx([1 / 36, 2.640625])
    extra = {"simpo": {"gamma": 0.75}}
    for kind, numbers in expected.items():
        got = value({"kind": kind, "beta": 0.5, **extra.get(kind, {})}, stats, batch)
        assert got.tolist() == pytest.approx(numbers, abs=1e-12), kind
    smoothed = value({"kind": "dpo", "beta": 0.5, "label_smoothing": 0.1}, stats, batch)
    numbers = [0.9 * softplus(-0.5 * m) + 0.1 * softplus(0.5 * m) for m in MARGINS["dpo"]]
    assert smoothed.tolist() == pytest.approx(numbers, abs=1e-12)


def test_values():
    value_oracle(ours)


def _changed(**fields: Any) -> Value:
    """The product's losses with class attributes changed."""

    def value(settings: dict[str, Any], stats: TokenStats, batch: Batch) -> torch.Tensor:
        loss: Any = parse("loss", settings, "loss")
        wrong = type("Wrong", (type(loss),), {"__annotations__": {}, **fields})
        return wrong(**loss.model_dump())(stats, batch)

    return value


def _negated(settings: dict[str, Any], stats: TokenStats, batch: Batch) -> torch.Tensor:
    return ours(settings, stats, batch.with_columns(preferences=-batch.column("preferences")))


def _gamma_inside(settings: dict[str, Any], stats: TokenStats, batch: Batch) -> torch.Tensor:
    if settings["kind"] != "simpo":
        return ours(settings, stats, batch)
    loss: Any = parse("loss", settings, "loss")
    return preference.dpo(loss.margin(stats, batch) - loss.gamma, beta=loss.beta)


MUTANTS: dict[str, Value] = {
    "chosen and rejected exchanged": _negated,
    "sums in place of means and the reverse": _changed(mean=property(lambda self: not type(self).__base__.mean)),
    "without the reference": _changed(relative=False),
    "gamma scaled by beta": _gamma_inside,
    "beta squared": lambda s, *rest: ours({**s, "beta": s["beta"] ** 2}, *rest),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_value_oracle_rejects(name: str):
    with pytest.raises(AssertionError):
        value_oracle(MUTANTS[name])


def test_margins_metrics_and_which_sequence_is_which():
    stats, batch = batch_of(pairs()[::-1])
    for kind, numbers in MARGINS.items():
        loss: Any = parse("loss", kind, "loss")
        seen = loss.monitor(stats.detach(), batch)
        assert seen["margin"].tolist() == pytest.approx(numbers, abs=1e-12)
        assert seen["accuracy"].tolist() == [1.0, 0.0]
        assert seen["chosen_logprobs"].tolist() == pytest.approx([-1.75, -1.5])
        assert seen["rejected_logprobs"].tolist() == pytest.approx([-2.5, -2.0])


def test_equal_policy_and_reference():
    """At the start the margin is 0: log 2 for DPO, and 1 / (4 beta^2) for IPO."""
    stats, batch = batch_of(pairs())
    same = batch.with_columns(reference_logprobs=stats.logprobs.detach())
    assert ours({"kind": "dpo"}, stats, same).tolist() == pytest.approx([math.log(2)] * 2)
    assert ours({"kind": "ipo"}, stats, same).tolist() == pytest.approx([25.0] * 2)


# --- gradients --------------------------------------------------------------------------------------------------------

# d loss / d log pi of each chosen token; of a rejected token it is the opposite, over its own length where scores are means.
SLOPES = {
    "dpo": lambda m: -0.5 / (1 + math.exp(0.5 * m)),
    "ipo": lambda m: 2 * (m - 1.0),
    "simpo": lambda m: -0.5 / (1 + math.exp(0.5 * m - 0.75)),
}


@pytest.mark.parametrize("kind", SLOPES)
def test_slopes(kind: str):
    stats, batch = batch_of(pairs())
    settings = {"kind": kind, "beta": 0.5} | ({"gamma": 0.75} if kind == "simpo" else {})
    ours(settings, stats, batch).sum().backward()
    for index, name in enumerate(batch.example_ids):
        group, sign = int(name[0]), float(name[1:])
        got = stats.logprobs.grad[(batch.sequence_BT == index) & batch.action_mask_BT]
        expected = sign * SLOPES[kind](MARGINS[kind][group]) / (1 if kind == "dpo" else len(got))
        assert got.tolist() == pytest.approx([expected] * len(got), abs=1e-12), name


HOW = [{}, {"max_rows": 1}, {"max_rows": 2}, {"pack_length": 12}]


@pytest.mark.parametrize("kind", ["dpo", "ipo", "simpo"])
@pytest.mark.parametrize("how", HOW)
def test_the_learner_gives_the_mean_over_pairs_for_any_split(kind: str, how: dict[str, Any]):
    """Value from the learner's own log-probabilities, gradient from autograd through them, whatever the micro-batches."""
    term = Term(loss=kind, reduce="group_mean", coef=0.5)
    batches = micro_batches(pairs(), pad_id=0, keep_groups=True, **how)
    learner = tiny_learner([term])
    outputs = [learner(b, denominators([term], batches)) for b in batches]
    for output in outputs:
        output["loss"].backward()
    got = [p.grad.clone() for p in learner.model.parameters()]

    reference = tiny_learner([])
    (batch,) = micro_batches(pairs(), pad_id=0)
    logits = reference.model(input_ids=batch.tokens_BT, attention_mask=(batch.sequence_BT >= 0).long()).logits
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, batch.tokens_BT[:, 1:, None])[..., 0]
    logprobs = torch.cat([torch.zeros_like(chosen[:, :1]), chosen], 1)
    expected = 0.5 * ours({"kind": kind}, TokenStats(logprobs), batch).mean()
    expected.backward()
    assert sum(float(o["loss"].detach()) for o in outputs) == pytest.approx(float(expected.detach()), rel=1e-6)
    for a, b in zip(got, reference.model.parameters(), strict=True):
        assert torch.allclose(a, b.grad, atol=1e-6 * float(b.grad.abs().max()) + 1e-12)
    margins = torch.cat([o["whole"]["0.margin"] for o in outputs])
    assert margins.shape == (2,) and torch.cat([o["whole"]["0.group_loss"] for o in outputs]).shape == (2,)


def test_a_selector_limits_what_a_pair_compares():
    """With the first token only, both scores are of one token; the head computes no others."""
    term = Term(
        loss={"kind": "simpo", "beta": 1.0, "gamma": 0.0}, reduce="group_mean", on={"kind": "position", "stop": 1}
    )
    batches = micro_batches(pairs(), pad_id=0, keep_groups=True)
    output = tiny_learner([term])(batches[0], denominators([term], batches))
    whole = output["whole"]
    assert output["masks"]["0"].sum() == 4
    expected = whole["0.chosen_logprobs"] - whole["0.rejected_logprobs"]
    assert torch.allclose(whole["0.margin"], expected, atol=1e-12)


def test_split_pairs_would_give_another_number():
    """What keeping groups together prevents must show on this data."""
    term = Term(loss="dpo", reduce="group_mean")
    learner = tiny_learner([term])

    def total(**how: Any) -> float:
        batches = micro_batches(pairs(), pad_id=0, **how)
        shares = denominators([term], batches)
        return sum(float(learner(b, shares)["loss"].detach()) for b in batches)

    assert total(max_rows=1, keep_groups=True) == pytest.approx(total(), rel=1e-6)
    assert abs(total(max_rows=1) - total()) > 1e-3


# --- TRL --------------------------------------------------------------------------------------------------------------


class _FakeModel:
    """A model whose log-probabilities are given; TRL's loss reads them from its output."""

    training = True

    def __init__(self, logprobs: torch.Tensor):
        zeros = torch.zeros_like(logprobs)
        self.outputs = SimpleNamespace(log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros > 0)

    def __call__(self, **inputs: Any) -> Any:
        return self.outputs


def _trl_dpo(loss_type: str, beta: float, stats: TokenStats, batch: Batch) -> torch.Tensor:
    """TRL's DPO loss on our tensors: rows [chosen, chosen, rejected, rejected]."""
    trainer = pytest.importorskip("trl.trainer.dpo_trainer")
    order = [list(batch.example_ids).index(n) for n in ("01.0", "11.0", "0-1.0", "1-1.0")]
    mask = batch.action_mask_BT[order]
    logprobs = stats.logprobs[order] * mask
    reference = (batch.column("reference_logprobs")[order] * mask).sum(1)
    same = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x, device=torch.device("cpu"))
    stub = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=same,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=0.0,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": batch.tokens_BT[order],
        "attention_mask": (batch.sequence_BT[order] >= 0).long(),
        "completion_mask": mask.long(),
        "ref_chosen_logps": reference[:2],
        "ref_rejected_logps": reference[2:],
    }
    return trainer.DPOTrainer._compute_loss(stub, _FakeModel(logprobs[:, 1:]), inputs, False)


@pytest.mark.parametrize(("kind", "loss_type"), [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_values_and_gradients_are_those_of_trl(kind: str, loss_type: str):
    for beta in (0.1, 0.5, 2.0):
        stats, batch = batch_of(pairs())
        theirs = _trl_dpo(loss_type, beta, stats, batch)
        expected = torch.autograd.grad(theirs, stats.logprobs)[0]
        mine = ours({"kind": kind, "beta": beta}, stats, batch).mean()
        assert float(mine.detach()) == pytest.approx(float(theirs.detach()), abs=1e-12)
        assert torch.allclose(torch.autograd.grad(mine, stats.logprobs)[0], expected, atol=1e-12)


def test_simpo_is_that_of_trl():
    trainer = pytest.importorskip("trl.experimental.cpo.cpo_trainer")
    stats, batch = batch_of(pairs())
    loss: Any = parse("loss", {"kind": "simpo", "beta": 2.5, "gamma": 1.4}, "loss")
    stub = SimpleNamespace(
        alpha=0.0,
        beta=2.5,
        simpo_gamma=1.4,
        label_smoothing=0.0,
        loss_type="simpo",
        accelerator=SimpleNamespace(device=torch.device("cpu")),
    )
    chosen, rejected = torch.tensor([-1.75 / 3, -1.5]).double(), torch.tensor([-1.25, -0.5]).double()
    theirs, *_ = trainer.CPOTrainer.cpo_loss(stub, chosen, rejected)
    assert torch.allclose(loss(stats, batch), theirs, atol=1e-7)
