"""Log-likelihoods of answers after prompts, through any `Scorer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from statewise.types import EvalContext

Group = tuple[Sequence[int], Sequence[Sequence[int]]]  # ids of a prompt, and of each answer
AT_ONCE = 64  # groups between two reports of progress


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
    kept = [(prompt[-max(1, room - max(map(len, answers))) :], answers) for prompt, answers in groups]
    shared = getattr(context.scorer, "score_answers", None)  # an engine that reads a prompt once for all its answers
    totals: list[list[float]] = []
    for start in range(0, len(kept), AT_ONCE):
        part = kept[start : start + AT_ONCE]
        totals += shared(part) if shared is not None else _one_by_one(context, part)
        context.progress(len(totals), len(kept))
    return [
        [Likelihood(total, len(answer)) for total, answer in zip(sums, answers, strict=True)]
        for sums, (_, answers) in zip(totals, kept, strict=True)
    ]


def _one_by_one(context: EvalContext, groups: Sequence[Group]) -> list[list[float]]:
    sequences = [[*prompt, *answer] for prompt, answers in groups for answer in answers]
    scored = iter(context.scorer.score(sequences, ("logprobs",)))
    return [[sum(next(scored)["logprobs"][-len(answer) :]) for answer in answers] for _, answers in groups]


def context_length(context: EvalContext) -> int:
    """Positions that the model has."""
    from statewise.models.batching import num_positions

    return num_positions(context.model)
