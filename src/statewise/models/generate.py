"""Sampling from a transformers causal language model in this process.

The t-th new token of row i is the inverse of the cumulative distribution at u_it, where u_i is the stream named
(seed, "row", i): it does not depend on which rows share a batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from statewise.errors import StatewiseError
from statewise.models.adapters import lean_adapters
from statewise.models.batching import (
    Batch,
    BatchedSampler,
    check_prompt,
    drawn_rows,
    evaluating,
    num_positions,
    read,
)
from statewise.models.law import check_law, draw
from statewise.types import Completion, Sampling, derive_seed


@dataclass
class _Row:
    """A prompt on its way. `limit`: most new tokens; `uniforms`: one a new token."""

    index: int
    prompt: Sequence[int]
    limit: int
    uniforms: np.ndarray
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False
    stop_reason: Literal["stop", "length"] = "length"

    @property
    def rows(self) -> tuple[_Row]:
        return (self,)

    @property
    def room(self) -> int:
        return self.limit - len(self.tokens)

    def append(self, token: int, logprob: float, stop_ids: Sequence[int]) -> None:
        check_drawn(logprob, self.index, len(self.tokens))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in stop_ids:
            self.stop_reason = "stop"
        self.ended = self.stop_reason == "stop" or len(self.tokens) == self.limit


class InProcessSampler(BatchedSampler):
    """The `Sampler` protocol on a transformers or PEFT model. Equal prompts are read once."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, rows: Sequence[int] | None = None
    ) -> list[Completion]:
        """One completion a prompt, in the order of the prompts.

        rows: numbers that name each prompt's random stream (default 0, 1, ...), so that a part of a larger list draws
        what it would draw inside it. A completion ends at `max_tokens` or where the model has no position left.
        Raises DataError for a prompt that is empty or fills the context, RecipeError for a sampling law that is none.
        """
        check_law(sampling)
        limits = self._limits(prompts, sampling)
        names = range(len(prompts)) if rows is None else rows
        done: dict[int, Completion] = {}
        with evaluating(self.model), lean_adapters(self.model), torch.no_grad():
            for row in self._finished(_queue(prompts, limits, names, sampling.seed), sampling):
                done[row.index] = Completion(tuple(row.tokens), tuple(row.logprobs), row.stop_reason)
                if self.progress is not None:
                    self.progress(len(done), len(prompts))
        return [done[index] for index in range(len(prompts))]

    def _limits(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[int]:
        """Most new tokens of each row."""
        context = num_positions(self.model)
        for index, prompt in enumerate(prompts):
            check_prompt(prompt, context, f"prompt {index}")
        return [min(sampling.max_tokens, context - len(prompt)) for prompt in prompts]

    def _read(self, items: list[_Row], law: Sampling) -> list[Batch]:
        batch, logits = read(self.model, items, self.pad_id)
        batch.ids = _append(items, logits, batch.at, law)
        return [batch]

    def _step(self, batch: Batch, law: Sampling) -> list[_Row]:
        going = [batch.rows[place] for place in batch.alive]
        places = torch.tensor(batch.alive, device=batch.ids.device)
        batch.put(places, _append(going, batch.feed(self.model), places, law))
        return [row for row in going if row.ended]


def stream(seed: int, name: int, count: int) -> np.ndarray:
    """`count` uniform numbers of the random stream of row number `name`."""
    return np.random.default_rng(derive_seed(seed, "row", int(name))).random(count)


def check_drawn(logprob: float, index: int, position: int) -> None:
    """Raises StatewiseError where what was drawn from was NaN."""
    if math.isnan(logprob):
        raise StatewiseError(
            f"prompt {index}: the model's logits are NaN after {position} new tokens, so there is "
            'nothing to sample from. Its weights are broken, or its dtype is too narrow: try dtype = "float32".'
        )


def _queue(prompts: Sequence[Sequence[int]], limits: Sequence[int], names: Sequence[int], seed: int) -> deque[_Row]:
    """Rows by falling prompt length, equal prompts together."""
    first: dict[tuple[int, ...], int] = {}
    order = sorted((-len(p), first.setdefault(tuple(p), i), i) for i, p in enumerate(prompts))
    return deque(_Row(i, prompts[i], limits[i], stream(seed, names[i], limits[i])) for *_, i in order)


def _append(rows: Sequence[_Row], logits: Tensor, at: Tensor, sampling: Sampling) -> Tensor:
    """Draw the next token of every row from the logits `at` its place, a part that fits the processor's cache at a time."""
    u = torch.tensor([row.uniforms[len(row.tokens)] for row in rows], dtype=torch.float64, device=logits.device)
    size = drawn_rows(logits)
    parts = [
        draw(logits[at[start : start + size]], u[start : start + size], sampling) for start in range(0, len(rows), size)
    ]
    picked, scores = (torch.cat(values) for values in zip(*parts, strict=True))
    for row, token, score in zip(rows, picked.tolist(), scores.tolist(), strict=True):
        row.append(token, score, sampling.stop_ids)
    return picked
