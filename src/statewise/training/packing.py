"""Rollouts into batches: padded rows, packed rows, and the micro-batches of every rank.

Groups needn't stay together for losses of tokens and sequences: denominators are global, and whatever compares the
rollouts of a group, such as a baseline, is computed before, on the whole step. A loss of groups needs them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from statewise.errors import DataError, RecipeError
from statewise.types import AUTHOR_CODE, PADDING, Batch, Example, Rollout, Segment

Row = list[Rollout]
Unit = list[Rollout]  # rollouts that stay together: a group, or one rollout
Block = list[Row]  # rows that stay in one micro-batch
# Alone and packed, hidden states differ by rounding; a leak changes them by tenths of their size.
LEAK_SHARE = 0.02


def collate(rollouts: Sequence[Rollout], pad_id: int) -> Batch:
    """One sequence a row, in the given order, padded on the right."""
    return _batch([[r] for r in rollouts], pad_id, column_names(rollouts), packed=False)


def pack(rollouts: Sequence[Rollout], length: int, pad_id: int) -> Batch:
    """Several sequences a row of at most `length` tokens (first-fit decreasing); a longer one gets a row of its own."""
    return _batch(_first_fit([[r] for r in rollouts], length), pad_id, column_names(rollouts), packed=True)


def micro_batches(
    rollouts: Sequence[Rollout],
    *,
    pad_id: int,
    max_tokens: int | None = None,
    max_rows: int | None = None,
    pack_length: int | None = None,
    num_ranks: int = 1,
    rank: int = 0,
    keep_groups: bool = False,
) -> list[Batch]:
    """This rank's share of `rollouts`, in batches by falling length; a function of its arguments alone.

    A batch has rows x longest row <= `max_tokens` and at most `max_rows` rows; a single row may be longer.
    pack_length: rows hold several sequences. keep_groups: the rollouts of a group are in one batch (packed: in one row),
    whatever its size. Every rank gets the same number of batches: where one has fewer, batches of one sequence without
    an action are added. Raises DataError where a column is missing on some rollouts.
    """
    names = column_names(rollouts)
    shapes = _shapes(rollouts, names)
    plans = []
    for share in _deal(_units(rollouts, keep_groups), num_ranks):
        if pack_length is None:
            blocks = [[[r] for r in unit] for unit in share]
        else:
            blocks = [[row] for row in _first_fit(share, pack_length)]
        plans.append(list(_groups(blocks, max_tokens, max_rows)))
    missing = max(len(plan) for plan in plans) - len(plans[rank])
    own = plans[rank] + [[[_nothing(pad_id, shapes)]]] * missing
    return [_batch(rows, pad_id, names, packed=pack_length is not None) for rows in own]


def model_inputs(batch: Batch) -> dict[str, torch.Tensor]:
    """What a transformers causal model takes.

    Packed rows go without a mask: then, and without a cache, the model blocks attention between sequences by itself,
    wherever the positions restart. Each padding token restarts them, so it is a sequence of its own.
    """
    if not batch.packed:
        return {"input_ids": batch.tokens_BT, "attention_mask": (batch.sequence_BT >= 0).long()}
    return {"input_ids": batch.tokens_BT, "position_ids": batch.position_BT}


def check_packing(model: Any, *, one_row: bool) -> None:
    """Raises RecipeError where packed sequences would see each other in this model.

    Runs two sequences alone and packed behind a neighbour. one_row: every micro-batch holds a single row.
    """
    from statewise.models.batching import evaluating
    from statewise.models.head import backbone, unwrap

    name = unwrap(model).config.model_type
    attention = getattr(unwrap(model).config, "_attn_implementation", None)
    if str(attention).startswith("flash_attention") and not one_row:
        raise RecipeError(
            f"batch.pack: {attention} keeps packed sequences apart only in micro-batches of one row; "
            'set batch.micro_rows = 1, or model.attention = "sdpa".'
        )
    body, device = backbone(model), next(model.parameters()).device
    row = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]], device=device) % unwrap(model).config.get_text_config().vocab_size
    position = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]], device=device)
    with evaluating(model), torch.no_grad():
        alone = body(input_ids=row[:, 4:], use_cache=False).last_hidden_state
        packed = body(input_ids=row, position_ids=position, use_cache=False).last_hidden_state[:, 4:]
    gap, size = (packed - alone).float().norm(), alone.float().norm()
    if not gap <= LEAK_SHARE * size:
        raise RecipeError(
            f"batch.pack: packed sequences see each other in a '{name}' model (attention {attention}): hidden states "
            f"change by {float(gap / size):.1%} behind a neighbour. Unset batch.pack."
        )


def _units(rollouts: Sequence[Rollout], keep_groups: bool) -> list[Unit]:
    if not keep_groups:
        return [[r] for r in rollouts]
    groups: dict[int, Unit] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    return list(groups.values())


def _first_fit(units: Sequence[Unit], length: int) -> list[Row]:
    rows: list[Row] = []
    room: list[int] = []
    for unit in _by_length(units):
        size = _size(unit)
        at = next((i for i, free in enumerate(room) if size <= free), None)
        if at is None:
            rows.append([])
            room.append(length)
            at = len(rows) - 1
        rows[at].extend(unit)
        room[at] -= size
    return rows


def _size(rollouts: Sequence[Rollout]) -> int:
    return sum(r.num_tokens for r in rollouts)


def _by_length(units: Sequence[Unit]) -> list[Unit]:
    return sorted(units, key=lambda unit: -_size(unit))


def _deal(units: Sequence[Unit], num_ranks: int) -> list[list[Unit]]:
    """By falling length, there and back over the ranks, so that shares are of nearly equal size."""
    shares: list[list[Unit]] = [[] for _ in range(num_ranks)]
    for index, unit in enumerate(_by_length(units)):
        turn, place = divmod(index, num_ranks)
        shares[place if turn % 2 == 0 else num_ranks - 1 - place].append(unit)
    return shares


def _groups(blocks: list[Block], max_tokens: int | None, max_rows: int | None) -> Iterator[list[Row]]:
    """Rows of blocks by falling width, cut where a batch is full."""
    width = {id(block): max(map(_size, block)) for block in blocks}
    group: list[Row] = []
    widest = 0
    for block in sorted(blocks, key=lambda block: -width[id(block)]):
        count = len(group) + len(block)
        full = max_rows is not None and count > max_rows
        if max_tokens is not None:
            full = full or count * widest > max_tokens
        if full and group:
            yield group
            group = []
        if not group:
            widest = width[id(block)]
        group = [*group, *block]
    if group:
        yield group


def _nothing(pad_id: int, shapes: dict[str, tuple[int, ...]]) -> Rollout:
    """Two tokens that nothing is learnt from."""
    columns = {name: np.zeros((2, *shape)) for name, shape in shapes.items()}
    return Rollout((Segment((pad_id, pad_id), "prompt"),), Example(""), columns=columns)


def _shapes(rollouts: Sequence[Rollout], names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Of what a column has at a token: () for a number, (K,) for a row."""
    return {name: np.shape(_column(rollouts[0], name))[1:] for name in names}


def column_names(rollouts: Sequence[Rollout]) -> list[str]:
    """Columns that every rollout has. Raises DataError where one is written on some rollouts only."""
    available = [set(r.columns) | _derived(r) for r in rollouts]
    common = set.intersection(*available) if available else set()
    for rollout in rollouts:
        for name in sorted(set(rollout.columns) - common):
            lacks = next(r for r, has in zip(rollouts, available, strict=True) if name not in has)
            raise DataError(
                f"column '{name}': sample '{rollout.example.id}' has it and sample '{lacks.example.id}' has not; "
                "a source or signal must write a column on all rollouts of a step or on none."
            )
    return sorted(common)


def _derived(rollout: Rollout) -> set[str]:
    names = {"rewards"} if rollout.reward is not None else set()
    if all(s.logprobs is not None for s in rollout.segments if s.train):
        names.add("behavior_logprobs")
    return names


def _column(rollout: Rollout, name: str) -> Sequence[float]:
    if name in rollout.columns:
        return rollout.columns[name]
    if name == "rewards":
        return [float(rollout.reward or 0.0)] * rollout.num_tokens
    return [v for s in rollout.segments for v in (s.logprobs or [0.0] * len(s.tokens))]


def _batch(rows: list[Row], pad_id: int, names: Sequence[str], *, packed: bool) -> Batch:
    shape = (len(rows), max([1, *(sum(r.num_tokens for r in row) for row in rows)]))
    tokens, position = np.full(shape, pad_id, np.int64), np.zeros(shape, np.int64)
    action, author = np.zeros(shape, bool), np.full(shape, PADDING, np.int8)
    sequence = np.full(shape, PADDING, np.int64)
    sequences = [r for row in rows for r in row]
    columns = {n: np.zeros((*shape, *s), np.float32) for n, s in _shapes(sequences, names).items()}
    for index, (place, rollout) in enumerate(_places(rows)):
        sizes = [len(s.tokens) for s in rollout.segments]
        tokens[place] = rollout.tokens()
        position[place] = np.arange(sum(sizes))
        author[place] = np.repeat([AUTHOR_CODE[s.author] for s in rollout.segments], sizes)
        action[place] = np.repeat([s.train for s in rollout.segments], sizes)
        sequence[place] = index
        for name, grid in columns.items():
            grid[place] = _column(rollout, name)
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(action & (position > 0)),
        torch.from_numpy(author),
        torch.from_numpy(position),
        torch.from_numpy(sequence),
        torch.tensor([r.group for r in sequences], dtype=torch.long),
        {name: torch.from_numpy(grid) for name, grid in columns.items()},
        example_ids=tuple(r.example.id for r in sequences),
        packed=packed,
    )


def _places(rows: list[Row]) -> Iterator[tuple[tuple[int, slice], Rollout]]:
    for number, row in enumerate(rows):
        start = 0
        for rollout in row:
            stop = start + rollout.num_tokens
            yield (number, slice(start, stop)), rollout
            start = stop
