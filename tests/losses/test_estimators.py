"""k1, k2, k3 by enumeration: what each measures, and what its gradient is as a loss and as a reward."""

import pytest
import torch
from torch import Tensor

from statewise.component import parse
from statewise.errors import RecipeError
from statewise.losses.divergence import kl
from statewise.losses.estimators import k1, k2, k3
from statewise.recipe import Recipe
from statewise.types import Batch, TokenStats

VOCAB = 6
ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def draws() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    policy, reference = 2 * torch.randn(2, VOCAB, generator=generator, dtype=torch.float64)
    return policy.requires_grad_(), reference


def gradient(value: Tensor, z: Tensor) -> Tensor:
    return torch.autograd.grad(value, z, retain_graph=True)[0]


def test_k1_and_k3_measure_the_kl_and_k2_does_not():
    z, reference = draws()
    p, exact = z.softmax(-1), kl(z, reference)
    found = {name: (p * of(z.log_softmax(-1), reference.log_softmax(-1))).sum() for name, of in ESTIMATORS.items()}
    assert found["k1"].item() == pytest.approx(exact.item(), abs=1e-12)
    assert found["k3"].item() == pytest.approx(exact.item(), abs=1e-12)
    assert abs(found["k2"].item() - exact.item()) > 0.05
    assert (k3(z.log_softmax(-1), reference.log_softmax(-1)) >= 0).all()


def test_as_a_loss_only_k2_has_the_gradient():
    z, reference = draws()
    log_p, log_q = z.log_softmax(-1), reference.log_softmax(-1)
    means = {name: gradient((log_p.exp().detach() * of(log_p, log_q)).sum(), z) for name, of in ESTIMATORS.items()}
    right = gradient(kl(z, reference), z)
    assert torch.allclose(means["k2"], right, atol=1e-12)
    assert means["k1"].abs().max() < 1e-12
    assert torch.allclose(means["k3"], gradient(kl(reference, z), z), atol=1e-12)
    assert (means["k3"] - right).abs().max() > 0.01


def test_as_a_reward_only_k1_has_the_gradient():
    z, reference = draws()
    log_p, log_q = z.log_softmax(-1), reference.log_softmax(-1)
    right = gradient(kl(z, reference), z)
    for name, of in ESTIMATORS.items():
        mean = gradient((log_p.exp().detach() * of(log_p, log_q).detach() * log_p).sum(), z)
        assert torch.allclose(mean, right, atol=1e-12) == (name == "k1"), name


def test_older_tokens_are_weighed_by_importance():
    """E_{y ~ mu}[gradient of the loss] = grad KL(policy || reference)."""
    z, reference = draws()
    mu = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(-1)
    nothing = torch.zeros(1, VOCAB, dtype=torch.long)
    columns = {"behavior_logprobs": mu[None], "reference_logprobs": reference.log_softmax(-1)[None]}
    loss = parse("loss", "reference_kl_sampled", "loss")
    value = loss(TokenStats(z.log_softmax(-1)[None]), Batch(*[nothing] * 5, nothing[0], columns))
    assert torch.allclose(gradient((mu.exp() * value[0]).sum(), z), gradient(kl(z, reference), z), atol=1e-12)


@pytest.mark.parametrize(("name", "reason"), [("k1", "gradient is 0"), ("k3", r"KL\(reference \|\| policy\)")])
def test_wrong_estimators_are_refused_with_the_reason(name: str, reason: str):
    with pytest.raises(RecipeError, match=reason):
        parse("loss", {"kind": "reference_kl_sampled", "estimator": name}, "objective.loss")


def test_only_on_tokens_of_the_policy():
    plain = {
        "source": {"kind": "dataset", "data": "tiny:math"},
        "signal": ["gold", "behavior", "reference"],
        "objective": ["nll", {"loss": "reference_kl_sampled", "coef": 0.1}],
        "budget": {"max_steps": 1},
    }
    with pytest.raises(RecipeError, match=r"objective\[1\].*tokens of \['dataset'\]"):
        Recipe.from_plain(plain)
