"""Sampling from a transformers causal language model in this process.

The t-th new token of row i is the inverse of the cumulative distribution at u_it, where u_i is the stream named
(seed, "row", i): it does not depend on which rows share a batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from statewise.errors import DataError, StatewiseError
from statewise.models.adapters import lean_adapters
from statewise.models.cache import RowCache, bytes_a_token, forward_cached, open_cache, right_aligned
from statewise.models.head import unwrap
from statewise.models.law import check_law, draw
from statewise.models.load import LoadedPolicy
from statewise.types import Completion, Sampling, derive_seed

# Rows that have ended stay until they are this share of a batch: to take them out copies the cache.
EXCHANGED_SHARE = 1 / 8
# Of keys and values, where the caller sets no bound; and the fewest tokens of a batch then.
CACHE_BYTES, LEAST_TOKENS = 2**30, 8192
# Logits that tokens are drawn from at a time: float32 and their exponentials should stay in a CPU's cache.
DRAWN_LOGITS = {"cpu": 2**19, "cuda": 2**28}


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
    def width(self) -> int:
        return len(self.prompt) + self.limit

    def append(self, token: int, logprob: float, stop_ids: Sequence[int]) -> None:
        if math.isnan(logprob):
            raise StatewiseError(
                f"prompt {self.index}: the model's logits are NaN after {len(self.tokens)} new tokens, so there is "
                'nothing to sample from. Its weights are broken, or its dtype is too narrow: try dtype = "float32".'
            )
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in stop_ids:
            self.stop_reason = "stop"
        self.ended = self.stop_reason == "stop" or len(self.tokens) == self.limit


@dataclass
class _Batch:
    """Rows and the cache that they go on from.

    at [B]: the cache's row of each; mask: which cached columns hold its tokens; ids [B]: the token to feed next.
    """

    rows: list[_Row]
    at: Tensor
    mask: Tensor
    ids: Tensor
    cache: Any

    @property
    def alive(self) -> list[int]:
        return [place for place, row in enumerate(self.rows) if not row.ended]


class InProcessSampler:
    """The `Sampler` protocol on a transformers or PEFT model.

    A batch holds at most `max_rows` rows and `batch_tokens` tokens, prompts and room for completions included (None: as
    many as have keys and values of a GiB); where rows have finished, others take their place. Equal prompts are read
    once. `progress(done, total)` is called as rows finish.
    """

    def __init__(
        self,
        model: Any,
        *,
        pad_id: int,
        batch_tokens: int | None = None,
        max_rows: int = 512,
        progress: Callable[[int, int], None] | None = None,
    ):
        self.pad_id, self.batch_tokens, self.max_rows, self.progress = pad_id, batch_tokens, max_rows, progress
        self.load(model)

    def load(self, policy: Any, version: int = 0) -> None:
        """Sample from this model, or the model of a LoadedPolicy, from now on. Its weights are shared: nothing is copied."""
        self.model = policy.model if isinstance(policy, LoadedPolicy) else policy

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
            if not 0 < len(prompt) < context:
                raise DataError(
                    f"prompt {index}: received {len(prompt)} tokens, expected at least 1 and fewer than the model's "
                    f"{context} positions; shorten it, or give it a first token such as BOS."
                )
        return [min(sampling.max_tokens, context - len(prompt)) for prompt in prompts]

    def _finished(self, queue: deque[_Row], sampling: Sampling) -> Iterator[_Row]:
        """The rows, each as it ends."""
        while queue and queue[0].limit == 0:
            yield queue.popleft()
        batch: _Batch | None = None
        while queue or batch is not None:
            if batch is None or len(batch.rows) - len(batch.alive) >= EXCHANGED_SHARE * len(batch.rows):
                entering = self._entering(queue, batch)
                fresh = self._read(entering, sampling) if entering else None
                yield from (row for row in entering if row.ended)
                batch = _exchanged([b for b in (batch, fresh) if b is not None])
            if batch is not None:
                yield from self._step(batch, sampling)

    def _entering(self, queue: deque[_Row], batch: _Batch | None) -> list[_Row]:
        """The next rows that there is room for beside those of the batch that go on."""
        staying = [batch.rows[place] for place in batch.alive] if batch is not None else []
        if batch is not None and staying and not isinstance(batch.cache, RowCache):
            return []
        limit = self.batch_tokens or max(LEAST_TOKENS, CACHE_BYTES // bytes_a_token(self.model))
        width = max((row.width for row in staying), default=0)
        entering: list[_Row] = []
        while queue and len(staying) + len(entering) < self.max_rows:
            width = max(width, queue[0].width)
            count = len(staying) + len(entering) + 1
            if count > 1 and count * width > limit:
                break
            entering.append(queue.popleft())
        return entering

    def _read(self, rows: list[_Row], sampling: Sampling) -> _Batch:
        """The rows with their first tokens drawn, on a cache that holds each different prompt once."""
        places: dict[tuple[int, ...], int] = {}
        owner = [places.setdefault(tuple(row.prompt), len(places)) for row in rows]
        ids, mask = self._left_padded(list(places))
        out, cache = forward_cached(self.model, ids, mask, open_cache(self.model), logits_to_keep=1)
        at = torch.tensor(owner, device=ids.device)
        return _Batch(rows, at, mask, _append(rows, out.logits[:, -1], at, sampling), cache)

    def _step(self, batch: _Batch, sampling: Sampling) -> list[_Row]:
        """Draw the next token of every row that goes on; returns those that ended with it."""
        going = [batch.rows[place] for place in batch.alive]
        alive = torch.tensor(batch.alive, device=batch.ids.device)
        # The column of a row that has ended is masked, so that its positions don't run out of the context.
        column = torch.zeros_like(batch.mask[:, :1]).index_fill_(0, alive, 1)
        batch.mask = torch.cat([batch.mask, column], 1)
        out, batch.cache = forward_cached(self.model, batch.ids[:, None], batch.mask, batch.cache, logits_to_keep=1)
        batch.ids = batch.ids.index_copy(0, alive, _append(going, out.logits[:, -1], alive, sampling))
        return [row for row in going if row.ended]

    def _left_padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        device = next(self.model.parameters()).device
        width = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), width), self.pad_id, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
            mask[row, width - len(prompt) :] = 1
        return ids.to(device), mask.to(device)


def _queue(prompts: Sequence[Sequence[int]], limits: Sequence[int], names: Sequence[int], seed: int) -> deque[_Row]:
    """Rows by falling prompt length, equal prompts together."""
    first: dict[tuple[int, ...], int] = {}
    order = sorted((-len(p), first.setdefault(tuple(p), i), i) for i, p in enumerate(prompts))
    streams = {i: np.random.default_rng(derive_seed(seed, "row", int(names[i]))) for *_, i in order}
    return deque(_Row(i, prompts[i], limits[i], streams[i].random(limits[i])) for *_, i in order)


def _append(rows: Sequence[_Row], logits: Tensor, at: Tensor, sampling: Sampling) -> Tensor:
    """Draw the next token of every row from the logits `at` its place, a part that fits the processor's cache at a time."""
    u = torch.tensor([row.uniforms[len(row.tokens)] for row in rows], dtype=torch.float64, device=logits.device)
    size = max(1, DRAWN_LOGITS.get(logits.device.type, DRAWN_LOGITS["cuda"]) // logits.shape[1])
    parts = [
        draw(logits[at[start : start + size]], u[start : start + size], sampling) for start in range(0, len(rows), size)
    ]
    picked, scores = (torch.cat(values) for values in zip(*parts, strict=True))
    for row, token, score in zip(rows, picked.tolist(), scores.tolist(), strict=True):
        row.append(token, score, sampling.stop_ids)
    return picked


def _exchanged(batches: Sequence[_Batch]) -> _Batch | None:
    """The rows that go on in one batch, no wider than they need; None where none does."""
    parts = [(b, b.alive) for b in batches if b.alive]
    if not parts:
        return None
    rows = [b.rows[place] for b, alive in parts for place in alive]
    ids = torch.cat([b.ids[alive] for b, alive in parts])
    taken = [(b, b.at[alive]) for b, alive in parts]
    first, index = taken[0]
    if isinstance(first.cache, RowCache):
        width = max(int(b.mask[at].sum(1).max()) for b, at in taken)
        mask = right_aligned([(b.mask, at) for b, at in taken], width, 1)
        room = max(row.limit - len(row.tokens) for row in rows)
        first.cache.exchange([(b.cache, at) for b, at in taken], width, room)
    else:
        mask = first.mask[index]
        first.cache.reorder_cache(index)
    return _Batch(rows, torch.arange(len(rows), device=ids.device), mask, ids, first.cache)


def num_positions(model: Any) -> int:
    """The longest sequence that the model takes, by its config; a very large number where it names none."""
    config = unwrap(model).config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None) or 1 << 60


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """The model in eval mode; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
