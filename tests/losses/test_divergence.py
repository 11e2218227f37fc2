"""Divergences from a teacher in float64: values and gradients against closed forms, direction, support, limits."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from statewise.component import parse
from statewise.losses.divergence import TeacherDivergence, coarsen, jsd, kl
from statewise.losses.policy_gradient import reinforce
from statewise.types import Batch, TokenStats

VOCAB = 7
KINDS = {
    "forward": {"kind": "kl_teacher_student"},
    "reverse": {"kind": "kl_student_teacher"},
    "jsd": {"kind": "jsd", "beta": 0.3},
}
SUPPORTS = [{}, {"top_k": 3}, {"top_k": 3, "support": "student"}, {"top_k": 1}, {"top_k": 6}, {"top_k": 99}]


def logits(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (4, VOCAB)), generator=generator, dtype=torch.float64) * 2


def loss_of(**settings: object) -> TeacherDivergence:
    return parse("loss", settings, "loss")  # type: ignore[return-value]


def batch_with(teacher: Tensor, temperature: float = 1.0) -> Batch:
    nothing = torch.zeros(1, teacher.shape[-2], dtype=torch.long)
    return Batch(*[nothing] * 5, nothing[0], dense={"teacher_logits": teacher[None]}, temperature=temperature)


def value_and_gradient(loss: TeacherDivergence, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    z = student.clone().requires_grad_()
    value = loss(TokenStats(torch.zeros(1, len(z)), None, z[None]), batch_with(teacher))[0]
    return value.detach(), torch.autograd.grad(value.sum(), z)[0]


def test_two_points_tell_the_direction():
    """p_T = (0.8, 0.2), p_S = (0.5, 0.5)."""
    teacher, student = torch.tensor([[0.8, 0.2]]).double().log(), torch.tensor([[0.5, 0.5]]).double().log()
    forward = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)
    reverse = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    assert abs(forward - reverse) > 0.02
    for name, expected in (("forward", forward), ("reverse", reverse)):
        value, _ = value_and_gradient(loss_of(**KINDS[name]), student, teacher)
        assert value.item() == pytest.approx(expected, abs=1e-12)


def test_gradients_have_their_closed_forms():
    """dKL(T||S)/dz = p_S - p_T; dKL(S||T)/dz_v = p_S(v) (log p_S(v) - log p_T(v) - KL)."""
    student, teacher = logits(0), logits(1)
    p, q = student.softmax(-1), teacher.softmax(-1)
    _, forward = value_and_gradient(loss_of(**KINDS["forward"]), student, teacher)
    assert torch.allclose(forward, p - q, atol=1e-12)
    value, reverse = value_and_gradient(loss_of(**KINDS["reverse"]), student, teacher)
    gap = student.log_softmax(-1) - teacher.log_softmax(-1)
    assert torch.allclose(reverse, p * (gap - value[:, None]), atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("support", SUPPORTS, ids=str)
def test_zero_with_zero_gradient_at_equality(kind: str, support: dict):
    same = logits(2)
    value, gradient = value_and_gradient(loss_of(**KINDS[kind], **support), same, same + 3.0)
    assert value.abs().max() < 1e-12 and gradient.abs().max() < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("support", SUPPORTS, ids=str)
def test_another_teacher_gives_another_gradient(kind: str, support: dict):
    loss, student = loss_of(**KINDS[kind], **support), logits(3)
    first, second = (value_and_gradient(loss, student, logits(seed))[1] for seed in (4, 5))
    assert (first - second).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_top_k_is_the_divergence_of_the_coarse_distributions(kind: str):
    """Value and gradient of a dictionary of K tokens and one bucket, written out."""
    student, teacher = logits(6), logits(7)
    ids = teacher.topk(3).indices
    z = student.clone().requires_grad_()

    def coarse(x: Tensor) -> Tensor:
        kept = x.softmax(-1).gather(-1, ids)
        return torch.cat([kept, 1 - kept.sum(-1, keepdim=True)], -1).log()

    of_kl = {"forward": lambda a, b: kl(b, a), "reverse": kl, "jsd": lambda a, b: jsd(b, a, 0.3)}[kind]
    expected = of_kl(coarse(z), coarse(teacher))
    value, gradient = value_and_gradient(loss_of(**KINDS[kind], top_k=3), student, teacher)
    assert torch.allclose(value, expected.detach(), atol=1e-12)
    assert torch.allclose(gradient, torch.autograd.grad(expected.sum(), z)[0], atol=1e-12)
    full, _ = value_and_gradient(loss_of(**KINDS[kind]), student, teacher)
    assert (value <= full + 1e-12).all() and (value < full - 1e-3).any()


def test_top_k_without_the_bucket_would_reward_leaving_the_support():
    """Mass moved out of the support lowers the truncated sum and raises the coarse divergence."""
    teacher = torch.tensor([[0.5, 0.4, 0.05, 0.05]]).double().log()
    inside, outside = (torch.tensor([p]).double().log() for p in ([0.5, 0.4, 0.05, 0.05], [0.05, 0.04, 0.46, 0.45]))

    def truncated(student: Tensor) -> Tensor:
        p, q = student.exp()[:, :2], teacher.exp()[:, :2]
        return (p * (p / q).log()).sum()

    assert truncated(outside) < truncated(inside)
    loss = loss_of(**KINDS["reverse"], top_k=2)
    assert value_and_gradient(loss, outside, teacher)[0] > value_and_gradient(loss, inside, teacher)[0] + 1.0


def test_the_bucket_is_logged():
    student, teacher = logits(8), logits(9)
    loss = loss_of(**KINDS["reverse"], top_k=2)
    seen = loss.monitor(TokenStats(torch.zeros(1, 4), None, student[None]), batch_with(teacher))
    ids = teacher.topk(2).indices
    assert torch.allclose(seen["outside_mass"][0], 1 - student.softmax(-1).gather(-1, ids).sum(-1), atol=1e-12)
    assert torch.allclose(seen["teacher_outside_mass"][0], 1 - teacher.softmax(-1).gather(-1, ids).sum(-1), atol=1e-12)
    assert (
        loss_of(**KINDS["reverse"]).monitor(TokenStats(torch.zeros(1, 4), None, student[None]), batch_with(teacher))
        == {}
    )


def test_coarsening_is_exact_far_out():
    """Log-masses, not masses: a tail of 1e-40 is not rounded to 0."""
    z = torch.tensor([[0.0, -1.0, -92.0, -93.0]], dtype=torch.float64)
    coarse = coarsen(z, torch.tensor([[0, 1]])).log_softmax(-1)
    assert coarse[0, 2].item() == pytest.approx(-92 + math.log1p(math.exp(-1)) - math.log1p(math.exp(-1)), abs=1e-9)
    assert torch.isfinite(coarsen(z.float() * 1e3, torch.tensor([[0, 1]]))).all()


def test_expected_sampled_gradient_is_that_of_the_reverse_kl():
    """E_{y ~ p_S}[d/dz reinforce(log p_S(y), A = log p_T(y) - log p_S(y))] = d/dz KL(p_S || p_T), by enumeration."""
    student, teacher = logits(10, 1, VOCAB), logits(11, 1, VOCAB)
    expected = torch.zeros(VOCAB, dtype=torch.float64)
    for token in range(VOCAB):
        z = student[0].clone().requires_grad_()
        logprob = z.log_softmax(-1)[token]
        advantage = teacher[0].log_softmax(-1)[token] - logprob.detach()
        (gradient,) = torch.autograd.grad(reinforce(logprob, advantage), z)
        expected += student[0].softmax(-1)[token] * gradient
    _, exact = value_and_gradient(loss_of(**KINDS["reverse"]), student, teacher)
    assert torch.allclose(expected, exact[0], atol=1e-12)


def test_sequences_too_have_the_sampled_gradient():
    """Two tokens: with the sum of later advantages as return, the expectation is the gradient of the sequence KL."""
    first, later = logits(12, VOCAB), logits(13, VOCAB, VOCAB)
    teacher_first, teacher_later = logits(14, VOCAB).log_softmax(-1), logits(15, VOCAB, VOCAB).log_softmax(-1)
    a, b = first.clone().requires_grad_(), later.clone().requires_grad_()
    log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
    joint = (log_a[:, None] + log_b).exp()
    exact = (joint * (log_a[:, None] + log_b - teacher_first[:, None] - teacher_later)).sum()
    exact_gradients = torch.autograd.grad(exact, (a, b), retain_graph=True)
    sampled = torch.zeros((), dtype=torch.float64)
    for x, y in itertools.product(range(VOCAB), repeat=2):
        gap_x = (teacher_first[x] - log_a[x]).detach()
        gap_y = (teacher_later[x, y] - log_b[x, y]).detach()
        sampled = sampled + joint[x, y].detach() * (-(gap_x + gap_y) * log_a[x] - gap_y * log_b[x, y])
    for got, expected in zip(torch.autograd.grad(sampled, (a, b)), exact_gradients, strict=True):
        assert torch.allclose(got, expected, atol=1e-12)


def test_a_sweep_over_beta_has_no_jump():
    student, teacher = logits(16, 1, VOCAB), logits(17, 1, VOCAB)
    betas = [0.0, 1e-6, 1e-4, 1e-3, *[i / 50 for i in range(1, 50)], 0.999, 1 - 1e-4, 1 - 1e-6, 1.0]
    found = [value_and_gradient(loss_of(kind="jsd", beta=b), student, teacher) for b in betas]
    values = [v.item() for v, _ in found]
    assert values[0] == pytest.approx(value_and_gradient(loss_of(**KINDS["forward"]), student, teacher)[0].item())
    assert values[-1] == pytest.approx(value_and_gradient(loss_of(**KINDS["reverse"]), student, teacher)[0].item())
    for (low, one), (high, other) in itertools.pairwise(zip(betas, found, strict=True)):
        slack = 60 * (high - low) + 1e-6
        assert abs(one[0] - other[0]).item() < slack and (one[1] - other[1]).abs().max().item() < slack


@pytest.mark.parametrize("states", [1.0, 0.7, 2.0])
def test_the_signal_has_a_temperature_of_its_own(states: float):
    """At states sampled at any temperature the divergence is between softmax(z / temperature of the signal)."""
    student, teacher = logits(18), logits(19)
    loss = loss_of(**KINDS["reverse"], temperature=1.5)
    stats = TokenStats(torch.zeros(1, 4), None, (student / states)[None])
    value = loss(stats, batch_with(teacher / states, states))[0]
    assert torch.allclose(value, kl(student / 1.5, teacher / 1.5), atol=1e-12)


def test_a_token_at_the_clip_gives_no_gradient():
    student, teacher = logits(20), logits(21)
    full, gradient = value_and_gradient(loss_of(**KINDS["reverse"]), student, teacher)
    bound = float(full.median()) + 1e-6
    value, clipped = value_and_gradient(loss_of(**KINDS["reverse"], clip=bound), student, teacher)
    above = full > bound
    assert above.any() and (~above).any()
    assert torch.equal(value, full.clamp(max=bound))
    assert clipped[above].abs().max() == 0 and torch.equal(clipped[~above], gradient[~above])


def test_padded_vocabularies_agree_on_the_shared_ids():
    student, teacher = logits(22), logits(23, 4, VOCAB + 5)
    for extra in (-50.0, 50.0):
        padded = torch.cat([teacher[:, :VOCAB], teacher[:, VOCAB:] + extra], -1)
        value, _ = value_and_gradient(loss_of(**KINDS["reverse"]), student, padded)
        assert torch.allclose(value, kl(student, teacher[:, :VOCAB]), atol=1e-12)
