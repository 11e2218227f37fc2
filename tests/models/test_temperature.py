"""The policy's temperature in the one-pass head: value and gradient against softmax(cap(z) / T) by autograd."""

import pytest
import torch
from torch import Tensor

from statewise.component import parse
from statewise.models.head import FullLogits, Projection
from statewise.models.onepass import Rows, objective_sum
from statewise.models.score import score_rows
from statewise.objective import Term
from statewise.types import Batch

T, SCALE, CAP = 0.7, 1.3, 5.0
N, D, V = 6, 4, 11


def batch_of(targets: Tensor, advantages: Tensor) -> Batch:
    tokens = targets[None]
    zero = torch.zeros(1, dtype=torch.long)
    return Batch(tokens, tokens >= 0, tokens * 0, tokens * 0 + 1, tokens * 0, zero, {"advantages": advantages[None]})


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, dtype=torch.float64, generator=generator)
    weight = torch.randn(V, D, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, V, (N,), generator=generator)
    advantages = torch.randn(N, dtype=torch.float64, generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets, advantages


def logits_of(hidden: Tensor, weight: Tensor, cap: float | None, temperature: float) -> Tensor:
    z = SCALE * hidden @ weight.T
    return (z if cap is None else cap * torch.tanh(z / cap)) / temperature


LOSSES = {
    "closed form": ({"kind": "reinforce"}, None),
    "closed form with an entropy weight": ({"kind": "reinforce"}, {"kind": "cll"}),
    "autograd in the chunk": ({"kind": "jsd"}, None),
}


@pytest.mark.parametrize("cap", [None, CAP])
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient(name: str, cap: float | None):
    loss, weight_kind = LOSSES[name]
    term = Term(loss=parse("loss", loss, "l"), weight=weight_kind and parse("weight", weight_kind, "w"))
    hidden, weight, targets, advantages = inputs()
    teacher = torch.randn(N, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = Rows(
        targets,
        batch_of(targets, advantages),
        {0: torch.ones(N, dtype=torch.float64)},
        dense={"teacher_logits": FullLogits(teacher)} if loss["kind"] == "jsd" else {},
    )
    got, _ = objective_sum(Projection(((hidden, weight),), None, SCALE, cap, T), rows, [term])
    gradients = torch.autograd.grad(got, [hidden, weight])

    from statewise.types import TokenStats

    logits = logits_of(hidden, weight, cap, T)
    log_p = logits.log_softmax(-1)
    stats = TokenStats(log_p.gather(-1, targets[:, None]).T, -(log_p.exp() * log_p).sum(-1)[None], logits[None])
    batch = rows.batch.with_dense(teacher_logits=teacher[None])
    factor = 1.0 if term.weight is None else term.weight(stats.detach(), batch).detach()
    expected = (term.loss(stats, batch) * factor).sum()
    assert torch.allclose(got, expected, atol=1e-10)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, [hidden, weight]), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-10)
    # The oracle has teeth: without the temperature, and with the cap's slope taken at the divided logits, it differs.
    wrong, _ = objective_sum(Projection(((hidden, weight),), None, SCALE, cap, 1.0), rows, [term])
    assert not torch.allclose(wrong, expected, atol=1e-3)


def test_full_logits_have_it_too():
    hidden, weight, targets, advantages = inputs()
    full = logits_of(hidden, weight, None, 1.0).detach().requires_grad_()
    rows = Rows(targets, batch_of(targets, advantages), {0: torch.ones(N, dtype=torch.float64)})
    term = Term(loss=parse("loss", "reinforce", "l"))
    got, _ = objective_sum(FullLogits(full, T), rows, [term])
    expected = -(advantages * (full / T).log_softmax(-1).gather(-1, targets[:, None])[:, 0]).sum()
    assert torch.allclose(got, expected, atol=1e-10)
    assert torch.allclose(torch.autograd.grad(got, full)[0], torch.autograd.grad(expected, full)[0], atol=1e-10)


def test_scores():
    hidden, weight, targets, _ = inputs()
    expected = logits_of(hidden, weight, CAP, T).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    projection = Projection(((hidden.detach(), weight.detach()),), None, SCALE, CAP, T)
    assert torch.allclose(score_rows(projection, targets)["logprobs"], expected.detach(), atol=1e-10)
