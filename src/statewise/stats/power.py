"""How many items a paired comparison needs, for the tests that the ledger uses."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np

MOST_ITEMS = 100_000_000
TAIL_SDS = 8.0  # numbers of discordant pairs further from their mean have no mass that shows


def mcnemar_power(n: int, delta: float, discordant: float, alpha: float = 0.05) -> float:
    """Power of the exact two-sided McNemar test on n pairs.

    Σ_m P[M = m] P[min(B, m - B) <= c_m | m], M ~ Binomial(n, d) changed pairs, B ~ Binomial(m, (d + delta) / 2d) gains,
    c_m the largest count that is significant among m. delta: difference of the two accuracies; discordant: d, the share of
    items on which the two differ. Raises ValueError unless |delta| <= d <= 1.
    """
    from scipy.special import bdtr, bdtrc, bdtrik
    from scipy.stats import binom

    _check(delta, discordant, alpha)
    centre, spread = n * discordant, math.sqrt(n * discordant * (1 - discordant)) * TAIL_SDS + 1
    m = np.arange(max(1, math.floor(centre - spread)), min(n, math.ceil(centre + spread)) + 1)
    if m.size == 0:
        return 0.0
    # bdtrik is real-valued and rounded: the integer below it, or that minus 1, is c_m; -1 where nothing is significant.
    cut = np.floor(np.nan_to_num(bdtrik(alpha / 2, m.astype(float), 0.5), nan=-1.0) + 1e-9).astype(int)
    cut = np.where((cut >= 0) & (2 * bdtr(np.maximum(cut, 0), m, 0.5) > alpha), cut - 1, cut)
    gain = (discordant + delta) / (2 * discordant)
    rejected = bdtr(np.maximum(cut, 0), m, gain) + bdtrc(np.maximum(m - cut - 1, 0), m, gain)
    return float((binom.pmf(m, n, discordant) * np.where(cut >= 0, rejected, 0.0)).sum())


def mcnemar_items(delta: float, discordant: float, alpha: float = 0.05, power: float = 0.8) -> int:
    """The fewest items at which the exact McNemar test has that power; the power falls by steps, and stays above after."""
    _check(delta, discordant, alpha)
    _check_share("power", power)
    if delta == 0:
        raise ValueError("delta: received 0; no number of items shows that there is no difference")
    start = approximate_items(delta, discordant, alpha, power)
    found = _least(lambda n: mcnemar_power(n, delta, discordant, alpha) >= power, max(1, start // 2))
    return found


def approximate_items(delta: float, discordant: float, alpha: float = 0.05, power: float = 0.8) -> int:
    """The normal approximation: ((z_{1-alpha/2} sqrt(d) + z_power sqrt(d - delta^2)) / delta)^2 (Connor 1987)."""
    z, zp = NormalDist().inv_cdf(1 - alpha / 2), NormalDist().inv_cdf(power)
    return math.ceil(((z * math.sqrt(discordant) + zp * math.sqrt(discordant - delta**2)) / delta) ** 2)


def mcnemar_delta(n: int, discordant: float, alpha: float = 0.05, power: float = 0.8) -> float | None:
    """The smallest difference that n items show with that power; None where not even delta = d is."""
    low, high = 0.0, discordant
    if mcnemar_power(n, high, discordant, alpha) < power:
        return None
    while high - low > 1e-4:
        middle = (low + high) / 2
        shown = mcnemar_power(n, middle, discordant, alpha) >= power
        low, high = (low, middle) if shown else (middle, high)
    return high


def t_items(delta: float, spread: float, alpha: float = 0.05, power: float = 0.8) -> int:
    """Items for a paired t-test of graded scores whose differences have the standard deviation `spread`.

    The least n with P[|T| > t_{n-1}] >= power, T noncentral t with delta sqrt(n) / spread.
    """
    from scipy.stats import nct
    from scipy.stats import t as student

    _check_share("alpha", alpha)
    _check_share("power", power)
    if delta == 0 or spread <= 0:
        raise ValueError(f"received delta {delta} and spread {spread}; expected delta other than 0 and spread > 0")

    def reached(n: int) -> bool:
        cut, shift = student.ppf(1 - alpha / 2, n - 1), abs(delta) * math.sqrt(n) / spread
        return bool(nct.sf(cut, n - 1, shift) + nct.cdf(-cut, n - 1, shift) >= power)

    return _least(reached, 2)


def _least(reached: Callable[[int], bool], start: int) -> int:
    """The least n from which on `reached`, by doubling and halving; ties of a sawtooth go to the larger n."""
    high = start
    while high > MOST_ITEMS or not reached(high):
        high *= 2
        if high > MOST_ITEMS:
            raise ValueError(f"more than {MOST_ITEMS:,} items would be needed; ask for a larger difference")
    low = high // 2 if high > start else 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _check(delta: float, discordant: float, alpha: float) -> None:
    _check_share("alpha", alpha)
    if not 0 < discordant <= 1 or abs(delta) > discordant:
        raise ValueError(
            f"discordant: received {discordant} with delta {delta}; expected a share in (0, 1] that is at least |delta|, "
            "since two accuracies differ by no more than the share of items on which they differ"
        )


def _check_share(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name}: received {value}, expected a share such as 0.05")
