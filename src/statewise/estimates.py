"""How an estimate is printed, everywhere."""

from __future__ import annotations

import math


def interval(
    value: float | None, low: float | None = None, high: float | None = None, form: str = ".3f", missing: str = "-"
) -> str:
    """`0.512 [0.470, 0.553]`; without brackets where there is no interval, `missing` where there is no value."""
    if value is None or math.isnan(value):
        return missing
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return f"{value:{form}}"
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"
