"""Gold tokens: the trained tokens of the source are themselves the target."""

from __future__ import annotations

from typing import ClassVar

from statewise.component import Signal


class Gold(Signal, kind="gold"):
    """The next token in the data is the target; valid on sources whose states carry gold tokens."""

    reads: ClassVar[tuple[str, ...]] = ("gold",)
