"""Rows that hold token ids beside their text, as sampling writes them: text that is encoded again may become other tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from statewise.sources.reading import Row, RowError, shown
from statewise.types import Author, Segment

IDS, MASKS = "input_ids", ("completion_mask", "assistant_masks")  # TRL's names


def stored_segments(tokenizer: Any, row: Row) -> tuple[Segment, ...] | None:
    """The row's `input_ids`, supervised where its mask is 1 (everywhere but at the first token where it has none).

    None where it holds no ids, or where they are not this tokenizer's: what is supervised is not the row's text.
    Raises RowError for ids and masks that can't be.
    """
    ids = row.get(IDS)
    if ids is None:
        return None
    name = next((m for m in MASKS if row.get(m) is not None), None)
    mask = [0] + [1] * (len(ids) - 1) if name is None else row[name]
    _check(ids, mask, name or MASKS[0])
    if not any(mask):
        raise RowError(f"{name}: marks no token, so the row would train nothing")
    vocabulary = len(tokenizer)
    if max(ids) >= vocabulary and _text(row) is None:
        raise RowError(f"{IDS}: are of another tokenizer", f"id {max(ids)} of {vocabulary} tokens")
    if max(ids) >= vocabulary or not _is_text_of(tokenizer, ids, mask, row):
        return None
    authors: dict[bool, Author] = {True: "dataset", False: "prompt"}
    runs = [(bool(train), [t for t, _ in run]) for train, run in groupby(zip(ids, mask, strict=True), lambda x: x[1])]
    return tuple(Segment(tuple(tokens), authors[train], train) for train, tokens in runs)


def _check(ids: Any, mask: Any, name: str) -> None:
    for field, value, allowed in ((IDS, ids, range(2**31)), (name, mask, (0, 1))):
        whole = isinstance(value, Sequence) and all(isinstance(x, int) and x in allowed for x in value)
        if not whole or not value:
            expected = "token ids" if field == IDS else "0 and 1"
            raise RowError(f"{field}: expected a list of {expected}", f"received {shown(value)}")
    if len(ids) != len(mask):
        raise RowError(f"{name}: has another length than {IDS}", f"{len(mask)} and {len(ids)}")


def _is_text_of(tokenizer: Any, ids: Sequence[int], mask: Sequence[int], row: Row) -> bool:
    """Whether the supervised ids are the answers in the row's text, spaces aside."""
    text = _text(row)
    if text is None:
        return True
    answer = ids if "text" in row else [t for t, train in zip(ids, mask, strict=True) if train]
    return "".join(str(tokenizer.decode(answer, skip_special_tokens=True)).split()) == "".join(text.split())


def _text(row: Row) -> str | None:
    """What the assistant says in the row's text; None where it has none."""
    for name in ("messages", "completion", "text"):
        value = row.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, Sequence) and all(isinstance(m, Mapping) for m in value):
            return "".join(str(m.get("content") or "") for m in value if m.get("role") == "assistant")
    return None
