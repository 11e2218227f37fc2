"""How much of the budget is spent, and how many steps it holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from statewise.settings import BatchSettings, Budget

IDLE_STEPS = 100  # in a row without a token to train, after which a budget of tokens counts as out of reach


@dataclass
class Spent:
    """What a run has used so far; it is the trainer state of a checkpoint.

    idle: steps in a row, up to the last, that trained no token. The three before it: see `Usage`.
    redraws: how often steps asked their source again.
    """

    step: int = 0
    tokens: int = 0
    rollouts: int = 0
    seconds: float = 0.0
    generated_tokens: int = 0
    teacher_tokens: int = 0
    flops: float = 0.0
    idle: int = 0
    redraws: int = 0


def num_steps(budget: Budget, batch: BatchSettings, num_examples: int | None, *, redraws: bool = False) -> int | None:
    """Steps that the budget holds, None where tokens, operations or seconds limit it, or epochs whose draws vary."""
    limits = []
    if budget.max_steps is not None:
        limits.append(budget.max_steps)
    if budget.max_epochs is not None and num_examples is not None:
        limits.append(math.ceil(budget.max_epochs * num_examples / batch.rollouts))
    open_ended = (budget.max_tokens, budget.max_flops, budget.max_seconds) != (None, None, None)
    open_ended |= redraws and budget.max_epochs is not None
    return min(limits) if limits and not open_ended else None


def progress(spent: Spent, budget: Budget, batch: BatchSettings, num_examples: int | None) -> float:
    """Share of the budget that is spent, in [0, 1]: the largest over the limits given; 1 where none can be reached."""
    shares = [1.0 if is_stuck(spent, budget) else 0.0]
    if budget.max_steps is not None:
        shares.append(spent.step / budget.max_steps if budget.max_steps else 1.0)
    if budget.max_epochs is not None and num_examples:
        steps = math.ceil(budget.max_epochs * num_examples / batch.rollouts)
        shares.append((spent.step + spent.redraws) / steps)
    if budget.max_tokens is not None:
        shares.append(spent.tokens / budget.max_tokens)
    if budget.max_flops is not None:
        shares.append(spent.flops / budget.max_flops)
    if budget.max_seconds is not None:
        shares.append(spent.seconds / budget.max_seconds)
    return min(1.0, max(shares))


def is_stuck(spent: Spent, budget: Budget) -> bool:
    """Whether a budget of tokens alone will never be spent: no step has trained one for long, as when a policy collapsed."""
    given = set(budget.model_dump(exclude_none=True))
    return given == {"max_tokens"} and spent.idle >= IDLE_STEPS
