"""How numbers and estimates are printed, everywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping

ENOUGH_SEEDS = 5


def few_seeds(seeds: Mapping[str, int]) -> str | None:
    """What the intervals of some arms leave out, given {arm: seeds}; None where all have enough."""
    few = [arm for arm, count in seeds.items() if 0 < count < ENOUGH_SEEDS]
    if not few:
        return None
    if all(count == 1 for count in seeds.values()):
        return "One seed an arm: intervals are over examples alone and say nothing of how runs with other seeds would differ."
    whose = "" if len(few) == len(seeds) else f" ({', '.join(few)})"
    return (
        f"Fewer than {ENOUGH_SEEDS} seeds{whose}: how runs differ from seed to seed is hardly known, and intervals are too "
        "narrow for it."
    )


def number(value: float, form: str = ".4g") -> str:
    """The value in `form`; what is rounded to 0 has no sign."""
    text = f"{value:{form}}"
    return text.lstrip("+-") if float(text) == 0 else text


def interval(
    value: float | None, low: float | None = None, high: float | None = None, form: str = ".3f", missing: str = "-"
) -> str:
    """`0.512 [0.470, 0.553]`; without brackets where there is no interval, `missing` where there is no value."""
    if value is None or math.isnan(value):
        return missing
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return number(value, form)
    return f"{number(value, form)} [{number(low, form)}, {number(high, form)}]"
