"""Rows that are sampled side by side: they are read, fed a token at a time, and where some have ended others take their
place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from statewise.errors import DataError
from statewise.models.cache import RowCache, bytes_a_token, forward_cached, open_cache, right_aligned
from statewise.models.head import unwrap
from statewise.models.load import LoadedPolicy

# Rows that have ended stay until they are this share of a batch: to take them out copies the cache.
EXCHANGED_SHARE = 1 / 8
# Of keys and values, where the caller sets no bound; and the fewest tokens of a batch then.
CACHE_BYTES, LEAST_TOKENS = 2**30, 8192
# Logits that tokens are drawn from at a time: float32 and their exponentials should stay in a CPU's cache.
DRAWN_LOGITS = {"cpu": 2**19, "cuda": 2**28}


class Row(Protocol):
    """A sequence on its way: its prompt, whether it has ended; `limit`: most new tokens, `room`: those that are left."""

    @property
    def prompt(self) -> Sequence[int]: ...
    @property
    def limit(self) -> int: ...
    @property
    def ended(self) -> bool: ...
    @property
    def room(self) -> int: ...


class Item(Protocol):
    """What a sampler finishes: one row, or several that get the same tokens."""

    @property
    def rows(self) -> Sequence[Row]: ...
    @property
    def ended(self) -> bool: ...


AnyItem = TypeVar("AnyItem", bound=Item)


@dataclass
class Batch:
    """Rows and the cache that they go on from.

    at [B]: the cache's row of each; mask: which cached columns hold its tokens; ids [B]: the token to feed next.
    """

    rows: list[Any]
    at: Tensor
    mask: Tensor
    ids: Tensor
    cache: Any

    @property
    def alive(self) -> list[int]:
        return [place for place, row in enumerate(self.rows) if not row.ended]

    def feed(self, model: Any) -> Tensor:
        """Logits [B, V] behind the next token of every row; call it where some row goes on."""
        alive = torch.tensor(self.alive, device=self.ids.device)
        # The column of a row that has ended is masked, so that its positions don't run out of the context.
        column = torch.zeros_like(self.mask[:, :1]).index_fill_(0, alive, 1)
        self.mask = torch.cat([self.mask, column], 1)
        out, self.cache = forward_cached(model, self.ids[:, None], self.mask, self.cache, logits_to_keep=1)
        logits: Tensor = out.logits[:, -1]
        return logits

    def put(self, places: Tensor, tokens: Tensor) -> None:
        """The tokens to feed next to the rows at `places`."""
        self.ids = self.ids.index_copy(0, places, tokens)


def read(model: Any, rows: Sequence[Row], pad_id: int) -> tuple[Batch, Tensor]:
    """The rows on a cache that holds each different prompt once; and the logits behind the prompts, for row i at `at[i]`."""
    places: dict[tuple[int, ...], int] = {}
    owner = [places.setdefault(tuple(row.prompt), len(places)) for row in rows]
    ids, mask = left_padded(list(places), pad_id, next(model.parameters()).device)
    out, cache = forward_cached(model, ids, mask, open_cache(model), logits_to_keep=1)
    at = torch.tensor(owner, device=ids.device)
    return Batch(list(rows), at, mask, torch.zeros_like(at), cache), out.logits[:, -1]


def left_padded(prompts: Sequence[Sequence[int]], pad_id: int, device: Any) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, T]."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad_id, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def exchanged(batches: Sequence[Batch]) -> Batch | None:
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
        room = max(row.room for row in rows)
        first.cache.exchange([(b.cache, at) for b, at in taken], width, room)
    else:
        mask = first.mask[index]
        first.cache.reorder_cache(index)
    return Batch(rows, torch.arange(len(rows), device=ids.device), mask, ids, first.cache)


class BatchedSampler(ABC):
    """Items from a queue, as many side by side as there is room for.

    A batch holds at most `max_rows` rows and `batch_tokens` tokens, prompts and room for completions included (None: as
    many as have keys and values of a GiB). `progress(done, total)` is called as items finish.
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

    @abstractmethod
    def _read(self, items: list[Any], law: Any) -> list[Batch]:
        """The items' rows on caches, with their first tokens drawn; one batch where the model's cache can't be joined."""

    @abstractmethod
    def _step(self, batch: Batch, law: Any) -> list[Any]:
        """Draw the next token of every item that goes on; returns those that ended with it."""

    def _finished(self, queue: deque[AnyItem], law: Any) -> Iterator[AnyItem]:
        """The items, each as it ends."""
        while queue and queue[0].rows[0].room == 0:
            yield queue.popleft()
        batch: Batch | None = None
        while queue or batch is not None:
            if batch is None or len(batch.rows) - len(batch.alive) >= EXCHANGED_SHARE * len(batch.rows):
                entering = self._entering(queue, batch)
                fresh = self._read(entering, law) if entering else []
                yield from (item for item in entering if item.ended)
                batch = exchanged([b for b in (batch, *fresh) if b is not None])
            if batch is not None:
                yield from self._step(batch, law)

    def _entering(self, queue: deque[AnyItem], batch: Batch | None) -> list[AnyItem]:
        """The next items that there is room for beside those of the batch that go on."""
        staying = [batch.rows[place] for place in batch.alive] if batch is not None else []
        if batch is not None and staying and not isinstance(batch.cache, RowCache):
            return []
        limit = self.batch_tokens or max(LEAST_TOKENS, CACHE_BYTES // bytes_a_token(self.model))
        count, width = len(staying), max((len(row.prompt) + row.limit for row in staying), default=0)
        entering: list[AnyItem] = []
        while queue:
            rows = queue[0].rows
            count += len(rows)
            width = max(width, *(len(row.prompt) + row.limit for row in rows))
            if (staying or entering) and (count > self.max_rows or count * width > limit):
                break
            entering.append(queue.popleft())
        return entering


def drawn_rows(logits: Tensor) -> int:
    """How many rows of logits [B, V] to draw from at a time."""
    return max(1, DRAWN_LOGITS.get(logits.device.type, DRAWN_LOGITS["cuda"]) // logits.shape[1])


def check_prompt(prompt: Sequence[int], context: int, where: str) -> None:
    """Raises DataError where the prompt is empty or leaves the model no position."""
    if not 0 < len(prompt) < context:
        raise DataError(
            f"{where}: received {len(prompt)} tokens, expected at least 1 and fewer than the model's "
            f"{context} positions; shorten it, or give it a first token such as BOS."
        )


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
