"""Runs that look healthy and learn nothing: named once, while they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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
    "num_groups_missing": (
        lambda value: value > 0,
        "the batch was not full after max_draws draws of the signal 'reward', {patience} steps in a row: nearly all groups have "
        "equal rewards, so most of what is sampled trains nothing. Take prompts that are neither too easy nor too hard, a larger "
        "source.group_size, or a smaller batch.rollouts.",
    ),
}


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
                found.append(f"step {row['step']}: {text.format(patience=PATIENCE)}{last}")
        return found
