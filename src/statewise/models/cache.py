"""Keys and values of rows that are being sampled: room to grow in place, rows that leave, rows that join.

Rows end at the same column, so that a step writes one column for all of them; a shorter row has padding before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from statewise.models.head import unwrap

Part = tuple[Tensor, Tensor]  # rows [B, T, ...] and the numbers of those to take


def forward_cached(module: Any, ids: Tensor, mask: Tensor, cache: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Output of a model or its backbone on new columns `ids`, and the cache that then holds them.

    mask: of the cached columns and the new ones; positions count its ones. What the module does not take is left out.
    """
    accepted = inspect.signature(unwrap(module).forward).parameters
    kwargs["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    known = {name: value for name, value in kwargs.items() if name in accepted}
    name = "cache" if "cache" in accepted else "past_key_values"  # transformers renamed it
    out = module(input_ids=ids, attention_mask=mask, use_cache=True, **{name: cache}, **known)
    return out, out[name]


def right_aligned(parts: Sequence[Part], width: int, dim: int, room: int = 0) -> Tensor:
    """The chosen rows of all parts: of each the last `width` positions of dimension `dim`, zeros before where it has fewer,
    and `room` unwritten positions behind."""
    first = parts[0][0]
    shape = list(first.shape)
    shape[0], shape[dim] = sum(len(index) for _, index in parts), width + room
    out, start = first.new_empty(shape), 0
    for held, index in parts:
        size = min(width, held.shape[dim])
        rows = out.narrow(0, start, len(index))
        rows.narrow(dim, 0, width - size).zero_()  # masked, but the values there are multiplied by 0
        rows.narrow(dim, width - size, size).copy_(
            held.narrow(dim, held.shape[dim] - size, size).index_select(0, index)
        )
        start += len(index)
    return out


class RowLayer(DynamicLayer):
    """Keys and values [B, H, T, D] of one layer; after an exchange, views into buffers with room for more columns."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        stop = start + key_states.shape[2]
        if not self.buffers or stop > self.buffers[0].shape[2]:
            self.buffers = []
            return super().update(key_states, value_states)
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:stop] = new
        self.keys, self.values = (buffer[:, :, :stop] for buffer in self.buffers)
        return self.keys, self.values

    def exchange(self, parts: Sequence[tuple[Any, Tensor]], width: int, room: int) -> None:
        """Hold the chosen rows of `parts`, each (layer, row numbers), and of each at most the last `width` columns."""
        both = ([(layer.keys, index) for layer, index in parts], [(layer.values, index) for layer, index in parts])
        self.buffers = [right_aligned(held, width, 2, room) for held in both]
        self.keys, self.values = (buffer[:, :, :width] for buffer in self.buffers)


class RowCache(Cache):
    """A cache whose rows can be exchanged."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=RowLayer)

    def exchange(self, parts: Sequence[tuple[RowCache, Tensor]], width: int, room: int) -> None:
        """Hold the chosen rows of `parts`, each (cache, row numbers), of each at most the last `width` columns, and have
        room for so many more."""
        layers: list[Any] = self.layers
        for number, layer in enumerate(layers):
            layer.exchange([(cache.layers[number], index) for cache, index in parts], width, room)


def open_cache(model: Any) -> RowCache | None:
    """An empty cache for the model; None where it holds other things than keys and values of every column."""
    inner = unwrap(model)
    layers = DynamicCache(config=inner.config).layers
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
    return RowCache() if plain and not getattr(inner, "_is_stateful", False) else None
