"""Log-likelihoods of answers after prompts, through any `Scorer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from statewise.types import EvalContext

Group = tuple[Sequence[int], Sequence[Sequence[int]]]  # ids of a prompt, and of each answer
AT_ONCE = 512  # sequences between two reports of progress


class Likelihood(NamedTuple):
    """log p(answer | prompt) in nats, and how many tokens it is a sum over."""

    total: float
    num_tokens: int

    @property
    def mean(self) -> float:
        """Nats a token."""
        return self.total / self.num_tokens


def likelihoods(context: EvalContext, groups: Sequence[Group]) -> list[list[Likelihood]]:
    """The likelihood of each answer of each group.

    A prompt that leaves no room for an answer loses its beginning, the same tokens for every answer of the group.
    """
    room = context_length(context)
    sequences, lengths = [], []
    for prompt, answers in groups:
        kept = prompt[-max(1, room - max(map(len, answers))) :]
        sequences += [[*kept, *answer] for answer in answers]
        lengths += [len(answer) for answer in answers]
    totals: list[float] = []
    for start in range(0, len(sequences), AT_ONCE):
        part = context.scorer.score(sequences[start : start + AT_ONCE], ("logprobs",))
        sizes = lengths[start : start + AT_ONCE]
        totals += [sum(scored["logprobs"][-size:]) for scored, size in zip(part, sizes, strict=True)]
        context.progress(len(totals), len(sequences))
    flat = iter(map(Likelihood, totals, lengths))
    return [[next(flat) for _ in answers] for _, answers in groups]


def context_length(context: EvalContext) -> int:
    """Positions that the model has."""
    from statewise.models.generate import num_positions

    return num_positions(context.model)
