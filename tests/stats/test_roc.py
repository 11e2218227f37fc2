"""AUC with DeLong's and clustered standard errors, and deflection, against definitions, oracles and simulation."""

import math

import numpy as np
import pytest

from statewise.stats.roc import Sums, auc, auc_difference, deflection


def test_the_definition() -> None:
    a, b = [3.0, 1.0, 2.0], [2.0, 0.0]
    assert auc(a, b).value == pytest.approx((1 + 1 + 0 + 1 + 0.5 + 1) / 6)
    assert auc(b, a).value == pytest.approx(1 - auc(a, b).value)
    assert auc([1, 1], [1, 1]).value == 0.5


def test_delong_by_hand() -> None:
    """Components of a: (1, 1/2, 3/4); of b: (1/2 + 0 + ... ) as DeLong 1988 writes them."""
    a, b = np.array([3.0, 1.0, 2.0]), np.array([2.0, 0.0])
    wins = (a[:, None] > b) + 0.5 * (a[:, None] == b)
    expected = wins.mean(1).var(ddof=1) / 3 + wins.mean(0).var(ddof=1) / 2
    assert auc(a, b).se == pytest.approx(math.sqrt(expected))


def test_no_overlap() -> None:
    found = auc([2.0] * 30, [1.0] * 50)
    assert found.value == 1.0 and found.high == 1.0 and found.low == pytest.approx(30 / (30 + 3.8414588), abs=1e-4)


def test_interval_covers() -> None:
    """95 % intervals of the AUC of N(1, 1) against N(0, 1), which is 0.7602."""
    random, hits = np.random.default_rng(0), 0
    for _ in range(400):
        found = auc(random.normal(1, 1, 40), random.normal(0, 1, 40))
        hits += found.low <= 0.7602499 <= found.high
    assert 0.92 <= hits / 400 <= 0.98


def test_clusters_count_once() -> None:
    """Ten copies of each value: the error of the values, not a third of it."""
    random = np.random.default_rng(1)
    a, b = random.normal(1, 1, 40), random.normal(0, 1, 40)
    alone, labels = auc(a, b), np.repeat(np.arange(40), 10)
    copied = auc(np.repeat(a, 10), np.repeat(b, 10), labels, labels)
    assert copied.value == pytest.approx(alone.value) and copied.se == pytest.approx(alone.se)
    assert auc(np.repeat(a, 10), np.repeat(b, 10)).se < 0.4 * alone.se


def test_paired_difference() -> None:
    random = np.random.default_rng(2)
    shared, noise = random.normal(0, 1, 200), random.normal(0, 0.3, 200)
    a1, b1 = shared + 1, random.normal(0, 1, 200)
    found = auc_difference((a1, b1), (a1 + noise, b1))
    assert found.value == pytest.approx(auc(a1, b1).value - auc(a1 + noise, b1).value)
    assert found.se < 0.5 * math.hypot(auc(a1, b1).se, auc(a1 + noise, b1).se)  # unpaired, the errors would add
    assert auc_difference((a1, b1), (a1, b1)).se == 0


def test_deflection_of_the_reference() -> None:
    """q = 0.7 p + 0.3 uniform over 50 tokens with N(0, 2.5) logits: 1.002 for CLL, 0.836 for log-likelihood."""
    random = np.random.default_rng(0)
    n, num_tokens = 60_000, 50
    z = random.normal(0, 2.5, (n, num_tokens))
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    log_p = np.log(p)
    entropy = -(p * log_p).sum(1)

    def draw(law: np.ndarray) -> np.ndarray:
        picked = (law.cumsum(1) < random.random((n, 1))).sum(1).clip(max=num_tokens - 1)
        drawn: np.ndarray = log_p[np.arange(n), picked]
        return drawn

    own, other = draw(p), draw(0.7 * p + 0.3 / num_tokens)
    cll = deflection(Sums.of(own + entropy), Sums.of(other + entropy), resamples=50)
    likelihood = deflection(Sums.of(own), Sums.of(other), resamples=50)
    assert cll.value == pytest.approx(1.002, abs=0.04) and likelihood.value == pytest.approx(0.836, abs=0.04)
    assert cll.low < cll.value < cll.high
    # SNR_CLL / SNR_LL = 1 + Var(H) / E[V]
    varentropy = (p * (log_p + entropy[:, None]) ** 2).sum(1)
    assert cll.value / likelihood.value == pytest.approx(1 + entropy.var() / varentropy.mean(), rel=0.03)


def test_refused() -> None:
    with pytest.raises(ValueError, match="received 0 and 1 values"):
        auc([], [1.0])
    with pytest.raises(ValueError, match="clusters: received 1 for 2 values"):
        auc([1.0, 2.0], [1.0], [0], [0])
