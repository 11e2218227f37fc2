"""Policy-gradient losses in float64: formulas by hand with plain numbers, and TRL's GRPO loss on the same tensors.

Every oracle is a function of the implementation, and wrong implementations (sign, swapped ratio, shifted advantages, a
clip on one side, a missing stop-gradient, another denominator) must be rejected by it.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from statewise.component import parse
from statewise.losses import policy_gradient
from statewise.objective import Term, denominators, factors, whole_factors
from statewise.training.packing import collate
from statewise.types import Batch, Example, Rollout, Segment, TokenStats

# log pi and log mu of each token of four completions, and their advantages; ratios reach beyond every bound used here.
POLICY = [[-0.5, -1.0, -0.2], [-2.0, -0.4], [-0.3, -0.9, -1.4, -0.1], [-1.1]]
BEHAVIOR = [[-0.6, -0.5, -0.2], [-2.4, -0.3], [-0.9, -0.8, -1.4, -0.2], [-0.7]]
ADVANTAGES = [1.5, -0.5, 0.25, -1.0]
LENGTH = 6
TOLERANCE = 1e-7  # the factors of reductions are float32

Loss = Callable[[TokenStats, Batch], Tensor]
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"loss": {"kind": "clip", "low": 0.2, "high": 0.2}, "reduce": "sequence_mean_token_mean"},
    "dr_grpo": {"loss": {"kind": "clip", "low": 0.2, "high": 0.2}, "reduce": "fixed_length", "length": LENGTH},
    "dapo": {"loss": {"kind": "clip", "low": 0.2, "high": 0.28}, "reduce": "token_mean"},
    "cispo": {"loss": {"kind": "cispo", "high": 0.25}, "reduce": "token_mean"},
    "gspo": {"loss": {"kind": "gspo", "low": 0.05, "high": 0.06}, "reduce": "sequence_mean"},
    "rloo": {"loss": "reinforce", "reduce": "sequence_mean"},
}


def term_of(name: str) -> Term:
    return Term.model_validate(SETTINGS[name])


def batch_and_stats() -> tuple[Batch, TokenStats]:
    rollouts = []
    for index, (own, old, advantage) in enumerate(zip(POLICY, BEHAVIOR, ADVANTAGES, strict=True)):
        segments = (Segment((3, 4), "prompt"), Segment(tuple(range(5, 5 + len(own))), "policy", True, tuple(old)))
        rollout = Rollout(segments, Example(str(index)), group=index // 2)
        size = rollout.num_tokens
        rollouts.append(rollout.with_columns(advantages=[advantage] * size, policy=[0.0, 0.0, *own]))
    batch = collate(rollouts, pad_id=0)
    batch = batch.map_tensors(lambda x: x.double() if x.is_floating_point() else x)
    exact = {n: batch.column(n).clone() for n in batch.columns}
    for row, (own, old, advantage) in enumerate(zip(POLICY, BEHAVIOR, ADVANTAGES, strict=True)):
        for name, values in (("policy", own), ("behavior_logprobs", old), ("advantages", [advantage] * len(own))):
            exact[name][row, 2 : 2 + len(own)] = torch.tensor(values, dtype=torch.float64)
    batch = batch.with_columns(**exact)
    return batch, TokenStats(batch.column("policy").clone().requires_grad_())


def of(term: Term, loss: Loss | None = None) -> tuple[float, list[float]]:
    """The term's value on the batch and its gradient on every action token's log-probability."""
    batch, stats = batch_and_stats()
    (denominator,) = denominators([term], [batch])
    factor = factors(term, batch, denominator).double()
    values = (loss or term.loss)(stats, batch)
    if term.loss.scope == "sequence":
        factor = whole_factors(term, batch, factor)
    total = (values * factor).where(factor != 0, 0.0).sum()
    (gradient,) = torch.autograd.grad(total, stats.logprobs)
    return float(total.detach()), gradient[batch.action_mask_BT].tolist()


def clip_by_hand(low: float, high: float, ratio: float, advantage: float) -> tuple[float, float]:
    """(loss, d loss / d log pi) of one token."""
    kept = not ((advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low))
    bounded = min(max(ratio, 1 - low), 1 + high)
    return -min(ratio * advantage, bounded * advantage), -ratio * advantage if kept else 0.0


def by_hand(name: str) -> tuple[float, list[float]]:
    """The same from the formulas with plain numbers."""
    loss = SETTINGS[name]["loss"]
    value, slopes = 0.0, []
    tokens = sum(map(len, POLICY))
    for own, old, advantage in zip(POLICY, BEHAVIOR, ADVANTAGES, strict=True):
        share = {
            "grpo": 1 / (4 * len(own)),
            "dr_grpo": 1 / (4 * LENGTH),
            "dapo": 1 / tokens,
            "cispo": 1 / tokens,
            "gspo": 1 / 4,
            "rloo": 1 / 4,
        }[name]
        if name == "gspo":
            mean = sum(a - b for a, b in zip(own, old, strict=True)) / len(own)
            part, slope = clip_by_hand(loss["low"], loss["high"], math.exp(mean), advantage)
            value += share * part
            slopes += [share * slope / len(own)] * len(own)
            continue
        for a, b in zip(own, old, strict=True):
            ratio = math.exp(a - b)
            if name == "cispo":
                cut = min(ratio, 1 + loss["high"])
                part, slope = -cut * advantage * a, -cut * advantage
            elif name == "rloo":
                part, slope = -advantage * a, -advantage
            else:
                part, slope = clip_by_hand(loss["low"], loss["high"], ratio, advantage)
            value += share * part
            slopes.append(share * slope)
    return value, slopes


def same(got: tuple[float, list[float]], expected: tuple[float, list[float]]) -> None:
    assert got[0] == pytest.approx(expected[0], abs=TOLERANCE)
    assert got[1] == pytest.approx(expected[1], abs=TOLERANCE)


@pytest.mark.parametrize("name", SETTINGS)
def test_formulas_by_hand(name: str):
    same(of(term_of(name)), by_hand(name))


def test_every_bound_is_reached():
    """So that the oracles can tell a missing clip."""
    batch, stats = batch_and_stats()
    for name in ("grpo", "dapo", "cispo", "gspo"):
        loss = term_of(name).loss
        assert 0 < float(loss.monitor(stats.detach(), batch)["clipped_share"].sum()) < sum(map(len, POLICY))
    log_ratio, advantages = stats.logprobs - batch.column("behavior_logprobs"), batch.column("advantages")
    cut = policy_gradient.is_clipped(log_ratio.detach(), advantages, low=0.2, high=0.2)
    (slope,) = torch.autograd.grad(
        policy_gradient.clipped_surrogate(
            stats.logprobs, batch.column("behavior_logprobs"), advantages, low=0.2, high=0.2
        ).sum(),
        stats.logprobs,
    )
    inside = batch.action_mask_BT
    assert bool(((slope == 0) == cut)[inside].all())


MUTANTS: dict[str, tuple[str, Loss]] = {
    "sign": ("grpo", lambda s, b: -term_of("grpo").loss(s, b)),
    "ratio upside down": (
        "grpo",
        lambda s, b: policy_gradient.clipped_surrogate(
            b.column("behavior_logprobs"), s.logprobs, b.column("advantages"), low=0.2, high=0.2
        ),
    ),
    "advantages shifted by a token": (
        "grpo",
        lambda s, b: term_of("grpo").loss(s, b.with_columns(advantages=b.column("advantages").roll(1, 0))),
    ),
    "a clip on one side": (
        "grpo",
        lambda s, b: -(s.logprobs - b.column("behavior_logprobs")).exp().clamp(0.8, 1.2) * b.column("advantages"),
    ),
    "one bound for both": (
        "dapo",
        lambda s, b: policy_gradient.clipped_surrogate(
            s.logprobs, b.column("behavior_logprobs"), b.column("advantages"), low=0.2, high=0.2
        ),
    ),
    "no stop-gradient": (
        "cispo",
        lambda s, b: (
            -(s.logprobs - b.column("behavior_logprobs")).exp().clamp(max=1.25) * b.column("advantages") * s.logprobs
        ),
    ),
    "a sum in place of the mean": (
        "gspo",
        lambda s, b: policy_gradient.clipped_surrogate(
            ((s.logprobs - b.column("behavior_logprobs")) * b.action_mask_BT).sum(-1),
            torch.zeros(4, dtype=torch.float64),
            torch.tensor(ADVANTAGES, dtype=torch.float64),
            low=0.05,
            high=0.06,
        ),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_oracle_rejects(mutant: str):
    name, loss = MUTANTS[mutant]
    with pytest.raises(AssertionError):
        same(of(term_of(name), loss), by_hand(name))


@pytest.mark.parametrize(("right", "wrong"), [("grpo", "dapo"), ("dr_grpo", "grpo"), ("rloo", "dapo")])
def test_the_oracle_rejects_another_denominator(right: str, wrong: str):
    term = term_of(right).model_copy(
        update={"reduce": SETTINGS[wrong]["reduce"], "length": SETTINGS[wrong].get("length")}
    )
    with pytest.raises(AssertionError):
        same(of(term), by_hand(right))


def test_a_fresh_policy_has_the_gradient_of_reinforce():
    """At ratio 1 all of them are the policy gradient, and PPO's value is minus the mean advantage."""
    batch, stats = batch_and_stats()
    fresh = batch.with_columns(behavior_logprobs=stats.logprobs.detach())
    expected = -batch.column("advantages")
    for kind in ("clip", "cispo", "reinforce"):
        value = parse("loss", kind, "l")(stats, fresh)  # type: ignore[operator]
        assert torch.equal(torch.autograd.grad(value.sum(), stats.logprobs)[0], expected)


def test_another_column_of_advantages():
    loss = parse("loss", {"kind": "reinforce", "advantages": "teacher_advantages"}, "l")
    assert loss.columns_read() == {"teacher_advantages"}
    batch, stats = batch_and_stats()
    batch = batch.with_columns(teacher_advantages=2 * batch.column("advantages"))
    value = loss(stats, batch)  # type: ignore[operator]
    assert torch.equal(value, -2 * batch.column("advantages") * stats.logprobs)


# --- TRL --------------------------------------------------------------------------------------------------------------


def of_trl(name: str) -> tuple[float, list[float]]:
    """TRL's `_compute_loss` on the same numbers, with everything around it left out."""
    trl = pytest.importorskip("trl")
    batch, stats = batch_and_stats()
    loss, mask = SETTINGS[name]["loss"], batch.action_mask_BT[:, 2:].double()
    own = stats.logprobs[:, 2:]
    rate = loss.get("high", 0.2)
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (own, torch.zeros_like(own.detach()), None),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if name == "gspo" else "token",
        beta=0.0,
        loss_type="grpo" if name == "gspo" else name,
        epsilon_low=loss.get("low", 0.2),
        epsilon_high=1 + rate if name == "cispo" else rate,
        args=SimpleNamespace(delta=None, steps_per_generation=1),
        use_vllm=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=LENGTH,
        accelerator=accelerator,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": batch.tokens_BT[:, :2],
        "prompt_mask": torch.ones_like(batch.tokens_BT[:, :2]),
        "completion_ids": batch.tokens_BT[:, 2:],
        "completion_mask": mask,
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "old_per_token_logps": batch.column("behavior_logprobs")[:, 2:],
        "num_items_in_batch": mask.sum(),
    }
    total = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(total, stats.logprobs)
    return float(total.detach()), gradient[batch.action_mask_BT].tolist()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo", "gspo"])
def test_parity_with_trl(name: str):
    same(of(term_of(name)), of_trl(name))
