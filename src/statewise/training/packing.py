"""Rollouts as tensors: padded rows or packed ones, cut into micro-batches and over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from statewise.errors import DataError
from statewise.types import AUTHOR_CODE, PADDING, Batch, Rollout

Row = list[Rollout]


def collate(rollouts: Sequence[Rollout], pad_id: int) -> Batch:
    """One rollout a row, padded on the right to the longest."""
    return _batch([[rollout] for rollout in rollouts], max(r.num_tokens for r in rollouts), pad_id, packed=False)


def pack(rollouts: Sequence[Rollout], length: int, pad_id: int) -> Batch:
    """Several rollouts a row of `length` tokens. No attention between them: positions restart at each."""
    return _batch(_packed_rows(rollouts, length), length, pad_id, packed=True)


def micro_batches(
    rollouts: Sequence[Rollout],
    *,
    pad_id: int,
    max_tokens: int | None = None,
    max_rows: int | None = None,
    pack_length: int | None = None,
    num_ranks: int = 1,
    rank: int = 0,
) -> list[Batch]:
    """This rank's micro-batches: rows x longest row at most `max_tokens` tokens and at most `max_rows` rows.

    A row that is longer on its own still gets a micro-batch. Every rank gets the same number of micro-batches (those
    without rollouts hold no action), so that collectives match. Rollouts of a group may be apart.
    """
    rows = [[r] for r in rollouts] if pack_length is None else _packed_rows(rollouts, pack_length)
    rows.sort(key=lambda row: -sum(r.num_tokens for r in row))
    width_of = (lambda row: row[0].num_tokens) if pack_length is None else (lambda row: pack_length)
    groups: list[list[Row]] = []
    for row in rows:
        width = width_of(groups[-1][0]) if groups else 0
        count = len(groups[-1]) + 1 if groups else 0
        if groups and not _full(count, width, max_tokens, max_rows):
            groups[-1].append(row)
        else:
            groups.append([row])
    while len(groups) < num_ranks and any(len(group) > 1 for group in groups):
        widest = max(range(len(groups)), key=lambda i: len(groups[i]))
        half = len(groups[widest]) // 2
        groups[widest : widest + 1] = [groups[widest][:half], groups[widest][half:]]
    mine = groups[rank::num_ranks]
    batches = [_batch(group, width_of(group[0]), pad_id, packed=pack_length is not None) for group in mine]
    missing = -(-len(groups) // num_ranks) - len(mine)
    return batches + [_empty(rollouts[0], pad_id)] * missing


def _full(count: int, width: int, max_tokens: int | None, max_rows: int | None) -> bool:
    return (max_tokens is not None and count * width > max_tokens) or (max_rows is not None and count > max_rows)


def _packed_rows(rollouts: Sequence[Rollout], length: int) -> list[Row]:
    """First fit, longest first; ties keep their order."""
    rows: list[Row] = []
    free: list[int] = []
    for rollout in sorted(rollouts, key=lambda r: -r.num_tokens):
        size = rollout.num_tokens
        if size > length:
            raise DataError(
                f"sample '{rollout.example.id}' has {size} tokens and does not fit batch.pack = {length}; raise it, or "
                "lower source.max_length."
            )
        index = next((i for i, room in enumerate(free) if room >= size), len(rows))
        if index == len(rows):
            rows.append([])
            free.append(length)
        rows[index].append(rollout)
        free[index] -= size
    return rows


def _batch(rows: list[Row], width: int, pad_id: int, *, packed: bool) -> Batch:
    flat = [rollout for row in rows for rollout in row]
    numbers = iter(range(len(flat)))
    order = [[next(numbers) for _ in row] for row in rows]
    names = _column_names(flat)
    return Batch(
        tokens_BT=_grid([[t for r in row for t in r.tokens()] for row in rows], width, pad_id, torch.long),
        action_mask_BT=_grid([[a for r in row for a in _actions(r)] for row in rows], width, False, torch.bool),
        author_BT=_grid([[a for r in row for a in _authors(r)] for row in rows], width, PADDING, torch.int8),
        position_BT=_positions(rows, width, packed),
        sequence_BT=_grid(
            [[i for r, i in zip(row, ids, strict=True) for _ in range(r.num_tokens)] for row, ids in zip(rows, order, strict=True)],
            width,
            PADDING,
            torch.long,
        ),
        group_S=torch.tensor([r.group for r in flat], dtype=torch.long),
        columns={
            name: _grid([[v for r in row for v in _column(r, name)] for row in rows], width, 0.0, torch.float32)
            for name in names
        },
        example_ids=tuple(r.example.id for r in flat),
        packed=packed,
    )


def _grid(rows: Sequence[Sequence[Any]], width: int, fill: Any, dtype: torch.dtype) -> Tensor:
    grid = torch.full((len(rows), width), fill, dtype=dtype)
    for index, row in enumerate(rows):
        grid[index, : len(row)] = torch.tensor(row, dtype=dtype)
    return grid


def _positions(rows: list[Row], width: int, packed: bool) -> Tensor:
    """0, 1, ... in each sequence; packed padding counts as one more sequence, padded padding is 0."""
    lines = []
    for row in rows:
        line = [i for r in row for i in range(r.num_tokens)]
        lines.append(line + list(range(width - len(line))) if packed else line)
    return _grid(lines, width, 0, torch.long)


def _actions(rollout: Rollout) -> Iterable[bool]:
    """Trained tokens; the first token of a sequence has no state."""
    flags = [s.train for s in rollout.segments for _ in s.tokens]
    return [False, *flags[1:]] if flags else []


def _authors(rollout: Rollout) -> Iterable[int]:
    return [AUTHOR_CODE[s.author] for s in rollout.segments for _ in s.tokens]


def _column_names(rollouts: Sequence[Rollout]) -> list[str]:
    """Columns of the rollouts, and what segments and rewards provide where every rollout has it."""
    names = {name for r in rollouts for name in r.columns}
    for name in sorted(names):
        without = [r.example.id for r in rollouts if name not in r.columns]
        if without:
            raise DataError(f"column '{name}': samples {without[:3]} have none and others do; a signal must write all of them.")
    sampled = [s for r in rollouts for s in r.segments if s.train]
    if sampled and all(s.logprobs is not None for s in sampled):
        names.add("behavior_logprobs")
    if all(r.reward is not None for r in rollouts):
        names.add("rewards")
    return sorted(names)


def _column(rollout: Rollout, name: str) -> Sequence[float]:
    if name in rollout.columns:
        return rollout.columns[name]
    if name == "rewards":
        return [float(rollout.reward or 0.0)] * rollout.num_tokens
    return [v for s in rollout.segments for v in (s.logprobs or (0.0,) * len(s.tokens))]


def _empty(like: Rollout, pad_id: int) -> Batch:
    """Two tokens and no action: what a rank computes while others have rollouts."""
    zeros = torch.zeros(1, 2, dtype=torch.long)
    names = _column_names([like])
    return Batch(
        tokens_BT=torch.full((1, 2), pad_id, dtype=torch.long),
        action_mask_BT=torch.zeros(1, 2, dtype=torch.bool),
        author_BT=torch.zeros(1, 2, dtype=torch.int8),
        position_BT=torch.arange(2)[None],
        sequence_BT=zeros,
        group_S=torch.zeros(1, dtype=torch.long),
        columns={name: torch.zeros(1, 2) for name in names},
        example_ids=("",),
    )


def model_inputs(batch: Batch) -> dict[str, Tensor]:
    """What a transformers model takes.

    Packed rows have positions that restart and no mask, from which transformers builds the block-causal mask itself.
    """
    if batch.packed:
        return {"input_ids": batch.tokens_BT, "position_ids": batch.position_BT}
    return {"input_ids": batch.tokens_BT, "attention_mask": (batch.sequence_BT >= 0).long()}

