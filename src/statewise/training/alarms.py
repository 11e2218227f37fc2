"""Runs that look healthy and learn nothing: named once, while they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

PATIENCE = 10  # steps in a row; a healthy run has a few such steps at its start
TOLD = 3  # warnings of one alarm; a policy that has collapsed would give a hundred

ALARMS: dict[str, tuple[Callable[[float], bool], str]] = {
    "reward_std": (
        lambda value: value == 0,
        "all rewards of a step were equal, {patience} steps in a row, so nothing is learnt from them: the task is too hard "
        "or too easy for this policy, the verifier does not understand how it answers, or prompts don't go through the chat "
        "template that the model knows (source.chat).",
    ),
    "truncated_share": (
        lambda value: value == 1,
        "every completion was cut at source.max_tokens, {patience} steps in a row: the policy writes no end token. Raise "
        "max_tokens, or look whether prompts go through the chat template that the model knows (source.chat).",
    ),
    "accepted_share": (
        lambda value: value == 0,
        "no completion was accepted, {patience} steps in a row, so no token was trained. Take easier prompts, a larger "
        "source.group_size or max_tokens, or a lower threshold; `statewise sample RECIPE source.threshold=0` shows what the "
        "policy writes.",
    ),
    "num_groups_missing": (
        lambda value: value > 0,
        "the batch was not full after max_draws draws of the signal 'reward', {patience} steps in a row: nearly all groups have "
        "equal rewards, so most of what is sampled trains nothing. Take prompts that are neither too easy nor too hard, a larger "
        "source.group_size, or a smaller batch.rollouts.",
    ),
}
# Metrics that tell why nothing was trained: at which mean that is the cause, and what to change. The first is the likeliest.
CAUSES: dict[str, tuple[Callable[[float], bool], str]] = {
    "truncated_share": (
        lambda mean: mean >= 0.5,
        "Most completions are cut at source.max_tokens: raise it, or look whether prompts go through the chat template that the "
        "model knows (source.chat).",
    ),
    "accepted_share": (
        lambda mean: mean == 0,
        "The verifier accepts nothing that the policy writes: take easier prompts, a larger source.group_size or a lower "
        "source.threshold; `statewise sample RECIPE source.threshold=0` shows what it writes.",
    ),
    "zero_variance_share": (
        lambda mean: mean >= 0.999,
        "All rewards of a group are equal: take prompts that are neither too easy nor too hard for this policy.",
    ),
}


def shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over rows of the metrics of `CAUSES`, those of all parts of a mixture together."""
    found: dict[str, list[float]] = {}
    for name, value in (item for row in rows for item in row.items()):
        found.setdefault(name.rpartition("/")[2], []).append(value)
    return {name: fmean(found[name]) for name in CAUSES if name in found}


def why_nothing(rows: Sequence[Mapping[str, Any]]) -> str:
    """Why rows of metrics came to nothing: the means that tell it, and what to change."""
    means = shares(rows)
    advice = [text for name, (is_cause, text) in CAUSES.items() if name in means and is_cause(means[name])]
    count = f"{len(rows)} step{'' if len(rows) == 1 else 's'}"
    told = f"{words(means)} (mean of {count})" if means else f"nothing tells why in {count}"
    return ". ".join([told, *advice[:1]]) if advice else f"{told}."


def words(means: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in means.items())


class Alarms:
    """Counts how long a metric has stood at a value that says that something is wrong."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.told: Counter[str] = Counter()

    def see(self, row: dict[str, Any]) -> list[str]:
        """The warnings that a row of metrics gives rise to: each when its count is full, and twice again when it was broken."""
        found = []
        for name, (is_wrong, text) in ALARMS.items():
            if name not in row:
                continue
            self.counts[name] = self.counts[name] + 1 if is_wrong(row[name]) else 0
            if self.counts[name] == PATIENCE and self.told[name] < TOLD:
                self.told[name] += 1
                last = " This is not told again." if self.told[name] == TOLD else ""
                now = f" Now: {words(means)}." if (means := shares([row])) else ""
                found.append(f"step {row['step']}: {text.format(patience=PATIENCE)}{now}{last}")
        return found
