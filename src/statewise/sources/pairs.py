"""Pairs of completions, of which one is preferred."""

from __future__ import annotations

from typing import Any, ClassVar

from statewise.sources.dataset import Segments, WrittenSource
from statewise.sources.reading import Row
from statewise.sources.rows import encode_preference
from statewise.types import Example


class PairsSource(WrittenSource, kind="pairs"):
    """Rows in TRL's preference formats: `prompt`, `chosen` and `rejected` (text or messages), or `chosen` and `rejected`
    conversations with the same beginning.

    A pair is a group of two rollouts, the chosen one first, with rewards 1 and 0; a step's rollouts count both.
    """

    writes: ClassVar[tuple[str, ...]] = ("rewards",)
    fields: ClassVar[tuple[str, ...]] = ("prompt", "chosen", "rejected", "answer", "id", "system")
    rewards: ClassVar[tuple[float | None, ...]] = (1.0, 0.0)

    def encode(self, tokenizer: Any, row: Row, place: str) -> tuple[Example, tuple[Segments, ...]]:
        return encode_preference(self, tokenizer, row, place)
