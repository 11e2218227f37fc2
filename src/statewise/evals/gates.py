"""Gates: limits on a ledger that a script or CI can rely on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from statewise.errors import RecipeError, nearest
from statewise.estimates import interval
from statewise.evals.ledger import Estimate, Ledger

# What each gate limits: (words, whether a larger value is worse).
GATES = {
    "max_drop": ("forgetting of a retention task", True),
    "max_mean_drop": ("mean forgetting", True),
    "min_retention": ("mean retention", False),
    "min_gain": ("gain of a target task", False),
    "max_probe_rise": ("rise of the held-out cross-entropy", True),
}
ROUNDING = 1e-9  # 0.80 - 0.75 is a little more than 0.05
Bound = Literal["point", "surely", "possibly"]


def parse_gate(text: str) -> tuple[str, float]:
    """`max_drop=0.02` as its name and limit. Raises RecipeError."""
    name, sign, value = text.partition("=")
    if name not in GATES:
        raise RecipeError(
            f"--gate {text}: unknown gate '{name}'{nearest(name, GATES)}; expected such as max_drop=0.02."
        )
    try:
        limit = float(value) if sign else math.nan
    except ValueError:
        limit = math.nan
    if math.isnan(limit):
        raise RecipeError(f"--gate {text}: received '{value}', expected a number such as {name}=0.02.")
    return name, limit


def violations(ledger: Ledger, gates: Sequence[tuple[str, float]], bound: Bound = "point") -> list[str]:
    """What breaks a gate, in words.

    bound: what is held against the limit: the estimate ("point"), the end of its interval that is kinder (so that only
    what is surely broken breaks: "surely") or harsher ("possibly").
    """
    found = []
    for name, limit in gates:
        words, large_is_bad = GATES[name]
        watched = _watched(ledger, name)
        if not watched:
            found.append(f"{ledger.name}: {name}: there is nothing to hold against it; no task has this purpose")
        for task, estimate in watched.items():
            value = _end(estimate, large_is_bad, bound)
            if not (value <= limit + ROUNDING if large_is_bad else value >= limit - ROUNDING):
                told = interval(estimate.value, estimate.low, estimate.high, ".4g")
                found.append(f"{ledger.name}: {name}={limit:g}: {words}{task} is {told}")
    return found


def _watched(ledger: Ledger, gate: str) -> dict[str, Estimate]:
    if gate == "max_mean_drop":
        return {"": ledger.forgetting} if ledger.of("retention") else {}
    if gate == "min_retention":
        return {"": ledger.retention} if ledger.of("retention") else {}
    purpose = {"max_drop": "retention", "min_gain": "target", "max_probe_rise": "probe"}[gate]
    sign = -1.0 if gate == "min_gain" else 1.0
    return {f" {c.task}": _signed(c.forgetting, sign) for c in ledger.of(purpose)}


def _signed(estimate: Estimate, sign: float) -> Estimate:
    ends = (estimate.low, estimate.high) if sign > 0 else (-estimate.high, -estimate.low)
    return Estimate(sign * estimate.value, *ends)


def _end(estimate: Estimate, large_is_bad: bool, bound: Bound) -> float:
    if bound == "point":
        return estimate.value
    return estimate.low if (bound == "surely") == large_is_bad else estimate.high
