"""Closed forms of the token weights and their gradients through the one-pass head, in float64.

Setup A: logits z = [2, 0.5, -1], each of the three tokens once as the target. Every oracle is a function of the
implementation, and for each there are mutants (a wrong sign, a shift, a missing detach, a wrong denominator) that it
must reject.
"""

from collections.abc import Callable

import pytest
import torch

from statewise import weights
from statewise.component import parse
from statewise.models.head import FullLogits
from statewise.models.onepass import Rows, objective_sum
from statewise.objective import Term
from statewise.types import Batch

Z = torch.tensor([2.0, 0.5, -1.0], dtype=torch.float64)
P = [0.7855970346, 0.1752903921, 0.0391125733]
LOGP = torch.tensor([-0.2413112967, -1.7413112967, -3.2413112967], dtype=torch.float64)
ENTROPY = 0.6215846047
PHI = [0.3802733080, -1.1197266920, -2.6197266920]
VARENTROPY = 0.6018087530
TOL = 1e-9

Gradient = Callable[[str, dict, torch.Tensor, int], tuple[float, torch.Tensor]]


def close(got: torch.Tensor | float, expected: object, tol: float = TOL) -> None:
    got = torch.as_tensor(got, dtype=torch.float64)
    assert torch.allclose(got, torch.as_tensor(expected, dtype=torch.float64), atol=tol, rtol=0), (got, expected)


def one_pass(weight: str | None, settings: dict, logits: torch.Tensor, target: int) -> tuple[float, torch.Tensor]:
    """Loss and dL/dz of one token through the product's own head."""
    term = Term(loss=parse("loss", "nll", "loss"), weight=weight and parse("weight", {"kind": weight, **settings}, "w"))
    full = logits[None].clone().requires_grad_()
    tokens = torch.tensor([[target]])
    batch = Batch(tokens, tokens >= 0, tokens * 0, tokens * 0 + 1, tokens * 0, torch.zeros(1, dtype=torch.long))
    rows = Rows(tokens[0], batch, {0: torch.ones(1, dtype=torch.float64)})
    loss, _ = objective_sum(FullLogits(full), rows, [term])
    loss.backward()
    return float(loss.detach()), full.grad[0]


# --- centred log-likelihood -------------------------------------------------------------------------------------------


def test_statistics_of_setup_a():
    from statewise.models.score import score_rows

    out = score_rows(FullLogits(Z.repeat(3, 1)), torch.arange(3), ("logprobs", "entropy", "varentropy", "rank"))
    close(out["logprobs"], LOGP)
    close(out["entropy"], [ENTROPY] * 3)
    close(out["logprobs"] + out["entropy"], PHI)
    close(out["varentropy"], [VARENTROPY] * 3)
    assert out["rank"].tolist() == [0, 1, 2]
    phi = out["logprobs"] + out["entropy"]
    p = torch.tensor(P, dtype=torch.float64)
    close((p * phi).sum(), 0.0)
    close((p * phi.square()).sum(), VARENTROPY)
    close(phi, Z - (p * Z).sum())


@pytest.mark.parametrize(
    ("q", "mean_phi"),
    [
        ([0.2, 0.5, 0.3], -1.2697266920),
        ([0.1, 0.1, 0.8], -2.1697266920),
        ([1.0, 0.0, 0.0], 0.3802733080),
        ([0.95, 0.04, 0.01], 0.2902733080),
    ],
)
def test_mean_phi_under_another_law(q: list[float], mean_phi: float):
    phi = LOGP + ENTROPY
    close((torch.tensor(q, dtype=torch.float64) * phi).sum(), mean_phi)


def test_shift_uniform_and_extra_column():
    from statewise.models.score import score_rows

    def phi(logits: torch.Tensor) -> torch.Tensor:
        out = score_rows(FullLogits(logits.repeat(3, 1)), torch.arange(3), ("logprobs", "entropy"))
        return out["logprobs"] + out["entropy"]

    close(phi(Z + 5.0), PHI)
    close(phi(torch.zeros(3, dtype=torch.float64)), [0.0] * 3)
    close(phi(torch.cat([Z, torch.tensor([-1e4], dtype=torch.float64)])), PHI)


# --- IDFT -------------------------------------------------------------------------------------------------------------

IDFT = [
    (0, 0.6836745299, 0.8479120295, 0.2046107513, [-0.1817948535, 0.1486308322, 0.0331640214]),
    (1, 2.0, 0.0307267216, 0.0535047874, [0.0241388214, -0.0253406225, 0.0012018011]),
    (2, 2.0, 0.0015297934, 0.0049585366, [0.0012018011, 0.0002681581, -0.0014699592]),
]


def idft_oracle(gradient: Gradient) -> None:
    for x, _, _, loss, slope in IDFT:
        value, got = gradient("cll", {}, Z, x)
        close(value, loss)
        close(got, slope)
        close(got.sum(), 0.0)
        assert got[x] < 0, "the target must be pushed up"
    value, got = gradient("cll", {"gamma_max": 1e9}, Z, 1)
    close(value, 0.0083895500)
    close(got, [0.0037849669, -0.0039734093, 0.0001884424])


def test_idft_loss_and_gradient():
    idft_oracle(one_pass)


def test_idft_pure_function():
    for x, gamma, w, _, _ in IDFT:
        close(weights.cll_gamma(LOGP[x], torch.tensor(ENTROPY, dtype=torch.float64)), gamma, 1e-8)
        close(weights.cll(LOGP[x], torch.tensor(ENTROPY, dtype=torch.float64)), w, 1e-8)
    entropy = torch.full((3,), ENTROPY, dtype=torch.float64)
    close(weights.cll_gamma(LOGP, entropy, gamma_min=0.0, gamma_max=1e9)[1:], [3.0640166685, 13.7319700146], 1e-7)
    close(weights.cll_gamma(LOGP, entropy, beta=0.5), [0.46741086, 2.0, 2.0], 1e-8)
    close(weights.cll_gamma(LOGP, entropy, beta=2.0), [0.82684613, 1.75043328, 2.0], 1e-8)
    close(weights.cll_gamma(LOGP, entropy, beta=1e9), [1.0, 1.0, 1.0], 1e-7)
    close(weights.cll_gamma(LOGP, entropy, strength=0.0), [1.0, 1.0, 1.0])
    close(weights.cll_gamma(LOGP, entropy, gamma_min=0, gamma_max=1e9, phi_clip=1.0)[2], torch.e, 1e-7)


def test_phi_mask():
    """phi = [0.380, -1.120, -2.620]: a bound of 1 keeps the first, of 2 the first two."""
    entropy = torch.full((3,), ENTROPY, dtype=torch.float64)
    close(weights.phi_mask(LOGP, entropy, bound=1.0), [1.0, 0.0, 0.0])
    close(weights.phi_mask(LOGP, entropy, bound=2.0), [1.0, 1.0, 0.0])
    for kind, settings, masked in (("phi_mask", {"bound": 2.0}, None), ("cll", {"phi_mask": 2.0}, "cll")):
        for x in (0, 1):  # inside: as without the mask
            value, got = one_pass(kind, settings, Z, x)
            expected, expected_grad = one_pass(masked, {}, Z, x)
            close(value, expected)
            close(got, expected_grad)
        value, got = one_pass(kind, settings, Z, 2)
        close(value, 0.0)
        close(got, [0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("p", "entropy", "phi", "gamma", "w", "digits"),
    [
        (0.99, 0.05, 0.040, 0.961, 0.9904, 5e-4),
        (0.5, 3.0, 2.307, 0.1, 0.9330, 5e-4),
        (0.05, 3.0, 0.004, 0.996, 0.0506, 5e-4),
        (0.05, 0.2, -2.796, 2.0, 2.5e-3, 5e-4),
        (0.01, 4.0, -0.605, 1.83, 2.2e-4, 5e-3),
        (1e-4, 0.5, -8.710, 2.0, 1e-8, 5e-4),
    ],
)
def test_idft_published_table(p: float, entropy: float, phi: float, gamma: float, w: float, digits: float):
    logp, h = torch.tensor(p, dtype=torch.float64).log(), torch.tensor(entropy, dtype=torch.float64)
    close(logp + h, phi, 6e-4)
    close(weights.cll_gamma(logp, h), gamma, digits)
    assert float(weights.cll(logp, h)) == pytest.approx(w, rel=0.02)


def test_idft_is_the_deformed_log_with_gamma_frozen():
    for x in range(3):
        p0 = Z.softmax(-1)[x]
        gamma = float(weights.cll_gamma(p0.log(), torch.tensor(ENTROPY, dtype=torch.float64)))
        _, got = one_pass("cll", {}, Z, x)
        for k in range(3):
            step = torch.zeros(3, dtype=torch.float64)
            step[k] = 1e-5
            up, down = (Z + step).softmax(-1)[x], (Z - step).softmax(-1)[x]
            slope = ((1 - up**gamma) - (1 - down**gamma)) / gamma / 2e-5
            close(got[k], slope, 1e-9)


def _by_autograd(weight_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Gradient:
    def gradient(weight: str, settings: dict, logits: torch.Tensor, target: int) -> tuple[float, torch.Tensor]:
        z = logits.clone().requires_grad_()
        log_p = z.log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum()
        loss = -weight_of(log_p[target], entropy) * log_p[target]
        return float(loss.detach()), torch.autograd.grad(loss, z)[0]

    return gradient


def _gamma(logp: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    return (-(logp + entropy)).exp().clamp(0.1, 2.0)


MUTANTS = {
    "v1: only gamma detached": lambda lp, h: lp.exp() ** _gamma(lp, h).detach(),
    "nothing detached": lambda lp, h: lp.exp() ** _gamma(lp, h),
    "wrong sign of phi": lambda lp, h: (lp.exp() ** (lp + h).exp().clamp(0.1, 2.0)).detach(),
    "entropy subtracted": lambda lp, h: (lp.exp() ** (-(lp - h)).exp().clamp(0.1, 2.0)).detach(),
    "weight is 1 / gamma": lambda lp, h: (1 / _gamma(lp, h)).detach(),
    "shifted by a thousandth": lambda lp, h: ((lp.exp() ** _gamma(lp, h)) + 1e-3).detach(),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_idft_oracle_rejects(name: str):
    with pytest.raises(AssertionError):
        idft_oracle(_by_autograd(MUTANTS[name]))


def test_the_right_formula_by_autograd_passes_the_oracle_up_to_its_own_clip():
    for x, _, _, loss, slope in IDFT:
        value, got = _by_autograd(lambda lp, h: (lp.exp() ** _gamma(lp, h)).detach())("cll", {}, Z, x)
        close(value, loss)
        close(got, slope)


def test_v1_gradient_is_what_the_reference_says_it_must_not_be():
    _, got = _by_autograd(MUTANTS["v1: only gamma detached"])("cll", {}, Z, 1)
    close(got, [-0.0599275833, 0.0629112020, -0.0029836187])


# --- the other weights ------------------------------------------------------------------------------------------------


def test_sft_and_dft_are_ends_of_idft():
    sft = [one_pass("cll", {"gamma_min": 0, "gamma_max": 0}, Z, x) for x in range(3)]
    close([v for v, _ in sft], [0.2413112967, 1.7413112967, 3.2413112967])
    close(sft[1][1], [0.7855970346, -0.8247096079, 0.0391125733])
    dft = [one_pass("cll", {"gamma_min": 1, "gamma_max": 1}, Z, x) for x in range(3)]
    close([v for v, _ in dft], [0.1895734391, 0.3052351400, 0.1267760256])
    close(dft[1][1], [0.1377076123, -0.1445636706, 0.0068560583])
    for x in range(3):
        close(one_pass("probability", {}, Z, x)[1], dft[x][1])
        close(one_pass(None, {}, Z, x)[1], sft[x][1])


def test_entropy_weights():
    value, _ = one_pass("entropy", {}, Z, 1)
    close(value, 0.9852177198)
    close(weights.entropy(torch.tensor(ENTROPY, dtype=torch.float64), num_tokens=3), 0.5657906898)
    close(weights.top_entropy(Z, k=2), 0.6853545351)
    value, got = one_pass("top_entropy", {"k": 2}, Z, 1)
    close(value, 0.6853545351 * 1.7413112967)
    close(got, 0.6853545351 * torch.tensor([0.7855970346, -0.8247096079, 0.0391125733], dtype=torch.float64))


def test_top_entropy_is_normalised_by_the_exact_log_of_k():
    """EAFT divides by ln k; 3.0, the rounding in circulation, or no division at all are other weights."""
    uniform = torch.zeros(50, dtype=torch.float64)
    close(weights.top_entropy(uniform), 1.0)
    close(weights.top_entropy(uniform, alpha=2.0), 1.0)
    with pytest.raises(AssertionError):
        close(weights.top_entropy(uniform) * torch.log(torch.tensor(20.0)) / 3.0, 1.0)


def test_importance_and_talr():
    reference = torch.tensor([-0.5, -1.0, -3.2], dtype=torch.float64)
    close(weights.importance(LOGP, reference), [1.2952305411, 0.4764886876, 0.9595303848])
    close(weights.importance(torch.zeros(1), torch.full((1,), -9.0)), [1.8], 1e-6)
    close(weights.importance_sequence(torch.tensor([0.1, 5.0], dtype=torch.float64)), [1.2214027582, 16.0])
    tau = torch.tensor(0.5, dtype=torch.float64)
    close(weights.talr(LOGP, tau), [0.6171627007, 0.0307267216, 0.01])


def test_uniform_and_saturated():
    value, got = one_pass("cll", {}, torch.zeros(3, dtype=torch.float64), 0)
    close(value, 0.3662040962)
    close(got, [-2 / 9, 1 / 9, 1 / 9])
    value, got = one_pass("cll", {}, torch.tensor([50.0, 0.0, 0.0], dtype=torch.float64), 0)
    assert value == pytest.approx(0.0, abs=1e-20) and float(got.abs().max()) < 1e-20
    value, got = one_pass("cll", {}, torch.tensor([50.0, 0.0, 0.0], dtype=torch.float64), 1)
    assert torch.isfinite(got).all() and value == pytest.approx(50 * torch.exp(torch.tensor(-100.0)).item(), rel=1e-6)


# --- behaviour --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (None, (0.3176, 0.8675, 0.9872)),
        ("probability", (0.1961, 0.5924, 0.9854)),
        ("cll", (0.1788, 0.2210, 0.9828)),
    ],
)
def test_training_on_one_target(weight: str | None, expected: tuple[float, ...]):
    z, seen = Z.clone(), {}
    for step in range(1, 101):
        z = z - 0.5 * one_pass(weight, {}, z, 1)[1]
        seen[step] = float(z.softmax(-1)[1])
    close([seen[1], seen[10], seen[100]], expected, 6e-5)


def test_v1_unlearns_the_target():
    gradient, z = _by_autograd(MUTANTS["v1: only gamma detached"]), Z.clone()
    for _ in range(100):
        z = z - 0.5 * gradient("cll", {}, z, 1)[1]
    close(z.softmax(-1)[1], 0.0344, 6e-5)
