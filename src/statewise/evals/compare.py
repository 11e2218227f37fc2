"""Two evaluations of the same examples, compared example by example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statewise.errors import DataError
from statewise.stats.hypothesis import mcnemar, mean_interval, mean_se, paired_t

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Paired:
    """Mean score before and after over `n` shared examples, their difference with its paired interval, and the p-value.

    `test`: "mcnemar" (exact, scores of 0 and 1) or "paired_t". `gained`, `lost`: examples whose score rose and fell.
    """

    n: int
    before: float
    after: float
    difference: float
    low: float
    high: float
    p_value: float
    test: str
    gained: int
    lost: int


def paired(before: Records, after: Records, confidence: float = 0.95) -> Paired:
    """Pair records by id. Raises DataError unless both evaluations are of the same examples."""
    old, new = ({record["id"]: record for record in records} for records in (before, after))
    if old.keys() != new.keys() or not old:
        alone = sorted(map(str, old.keys() ^ new.keys()))
        raise DataError(
            f"paired comparison: received {len(old)} examples before and {len(new)} after, of which {len(alone)} have "
            f"no partner {alone[:3]}; expected the same examples. Evaluate both with the same data and limit."
        )
    x, y = ([float(side[name]["score"]) for name in old] for side in (old, new))
    weights = [float(old[name].get("weight", 1.0)) for name in old]
    gaps = [b - a for a, b in zip(x, y, strict=True)]
    binary = {*x, *y} <= {0.0, 1.0}
    p_value = mcnemar(x, y) if binary else paired_t(x, y, weights)
    low, high = mean_interval(gaps, confidence, weights=weights)
    first, second, difference = (mean_se(values, weights)[0] for values in (x, y, gaps))
    gained, lost = sum(g > 0 for g in gaps), sum(g < 0 for g in gaps)
    test = "mcnemar" if binary else "paired_t"
    return Paired(len(x), first, second, difference, low, high, p_value, test, gained, lost)
