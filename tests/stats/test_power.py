"""Power: the exact sum against simulation, the approximation against the reference's numbers."""

import numpy as np
import pytest
from scipy import stats as scipy_stats

from statewise import stats
from statewise.stats.power import approximate_items


def simulated_power(n: int, delta: float, share: float, draws: int = 20_000) -> float:
    """How often the exact test, as the ledger computes it, rejects at 5 %."""
    random = np.random.default_rng(0)
    shares = [(share + delta) / 2, (share - delta) / 2, 1 - share]
    counts = random.multinomial(n, shares, size=draws)
    known: dict[tuple[int, int], float] = {}
    hits = 0
    for up, down in counts[:, :2].tolist():
        if (up, down) not in known:
            known[up, down] = stats.mcnemar([0] * up + [1] * down, [1] * up + [0] * down)
        hits += known[up, down] <= 0.05
    return hits / draws


@pytest.mark.parametrize(
    ("n", "delta", "share"), [(200, 0.1, 0.25), (900, 0.046, 0.25), (60, 0.3, 0.4), (150, -0.1, 0.3)]
)
def test_exact_power_is_the_simulated_one(n: int, delta: float, share: float) -> None:
    assert stats.mcnemar_power(n, delta, share) == pytest.approx(simulated_power(n, delta, share), abs=0.011)


def test_power_at_no_difference_is_below_the_level() -> None:
    for n in (20, 100, 1000):
        assert 0 < stats.mcnemar_power(n, 0.0, 0.3) <= 0.05
    assert stats.mcnemar_power(3, 0.5, 0.5) == 0.0  # three pairs can't be significant


def test_items_of_the_reference() -> None:
    """A quarter discordant: about 900 items for 4.6 points at 80 %, about 2,200 for three."""
    assert approximate_items(0.046, 0.25) == 925 and approximate_items(0.03, 0.25) == 2178
    assert stats.mcnemar_items(0.046, 0.25) == 963 and stats.mcnemar_items(0.03, 0.25) == 2238


@pytest.mark.parametrize(("delta", "share"), [(0.1, 0.25), (0.3, 0.4), (0.2, 0.2)])
def test_items_are_the_fewest(delta: float, share: float) -> None:
    n = stats.mcnemar_items(delta, share)
    assert stats.mcnemar_power(n, delta, share) >= 0.8 > stats.mcnemar_power(n - 1, delta, share)


def test_smallest_difference() -> None:
    found = stats.mcnemar_delta(500, 0.25)
    assert found == pytest.approx(0.0641, abs=2e-4)
    assert stats.mcnemar_power(500, found, 0.25) >= 0.8 > stats.mcnemar_power(500, found - 2e-4, 0.25)
    assert stats.mcnemar_delta(5, 0.2) is None


def test_t_items() -> None:
    """The noncentral t by simulation: n gives 80 %."""
    n = stats.t_items(0.5, 1.0)
    assert n == 34  # G*Power, two-tailed, dz = 0.5
    gaps = np.random.default_rng(0).normal(0.5, 1.0, size=(20_000, n))
    rejected = scipy_stats.ttest_1samp(gaps, 0, axis=1).pvalue <= 0.05
    assert rejected.mean() == pytest.approx(0.81, abs=0.012)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.3, 0.2), "at least .delta."),
        ((0.0, 0.2), "received 0"),
        ((0.1, 0.2, 2.0), "alpha"),
        ((0.1, 0.2, 0.05, 1.0), "power"),
    ],
)
def test_refusals(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stats.mcnemar_items(*arguments)


def test_a_difference_beyond_measuring_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="more than 100,000,000 items would be needed"):
        stats.mcnemar_items(1e-9, 0.2)
