"""The test of own samples: how often it is wrong where the samples are own, and what it finds where they are not."""

import math

import numpy as np
import pytest

from statewise.stats.martingale import TokenSums, own_test

NUM_TOKENS = 50


def drawn(random: np.random.Generator, scale: float, n: int, power: float = 1.0) -> TokenSums:
    """n tokens from p^power, renormalised, p with N(0, scale) logits over 50 tokens."""
    z = random.normal(0, scale, (n, NUM_TOKENS))
    z -= z.max(1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
    p, q = np.exp(log_p), np.exp(power * log_p)
    q /= q.sum(1, keepdims=True)
    centred = log_p - (p * log_p).sum(1, keepdims=True)
    picked = (q.cumsum(1) < random.random((n, 1))).sum(1).clip(max=NUM_TOKENS - 1)
    return TokenSums.of(centred[np.arange(n), picked], (p * centred**2).sum(1), (p * centred**4).sum(1))


@pytest.mark.parametrize(("scale", "n"), [(2.5, 20), (2.5, 200), (6.0, 60), (15.0, 300)])
def test_false_alarms(scale: float, n: int) -> None:
    """At 5 %, each of the tests and both together: the share of own samples that is refused."""
    random = np.random.default_rng(0)
    found = [own_test(drawn(random, scale, n)) for _ in range(800)]
    for name in ("p_mean", "p_variance", "p"):
        share = np.mean([getattr(t, name) < 0.05 for t in found])
        assert 0.02 <= share <= 0.075, (name, share)


def test_variance_by_the_sample_would_not_do() -> None:
    """Scaled by the squares that were seen instead of F - V^2, a third of short own samples would be refused."""
    random, wrong = np.random.default_rng(0), 0
    for _ in range(300):
        n = 30
        z = random.normal(0, 6, (n, NUM_TOKENS))
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        centred = np.log(p) - (p * np.log(p)).sum(1, keepdims=True)
        picked = (p.cumsum(1) < random.random((n, 1))).sum(1).clip(max=NUM_TOKENS - 1)
        excess = centred[np.arange(n), picked] ** 2 - (p * centred**2).sum(1)
        wrong += abs(excess.sum()) / math.sqrt((excess**2).sum()) > 1.96
    assert wrong / 300 > 0.15


def test_power() -> None:
    """The drift that is called detectable is found four times in five; E[phi] = (power - 1) V near power 1."""
    random, n = np.random.default_rng(1), 400
    needed = own_test(drawn(random, 2.5, n)).detectable
    mean_variance = drawn(random, 2.5, 20_000).variance / 20_000
    found = [own_test(drawn(random, 2.5, n, power=1 + needed / mean_variance)) for _ in range(300)]
    assert 0.7 <= np.mean([t.p_mean < 0.05 for t in found]) <= 0.9
    assert np.mean([t.z > 0 for t in found]) > 0.95  # sharper than p: upwards


def test_numbers() -> None:
    sums = TokenSums(count=100, phi=10.0, square=120.0, variance=100.0, square_variance=400.0)
    test = own_test(sums)
    assert test.z == 1.0 and test.p_mean == pytest.approx(0.3173105, abs=1e-6)
    assert test.variance_ratio == 1.2 and test.p_variance == pytest.approx(0.3173105, abs=1e-6)
    assert test.p == pytest.approx(0.634621, abs=1e-5) and test.detectable == pytest.approx(0.2801585, abs=1e-5)
    assert sums + TokenSums() == sums
    assert math.isnan(own_test(TokenSums(count=9, phi=1, square=1, variance=9, square_variance=1)).p)
