"""Verifiers: how well a completion answers its example, as a number."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from statewise.component import Component, parse
from statewise.errors import DataError, RecipeError

if TYPE_CHECKING:
    from statewise.types import Example

Judge = Callable[[str, "Example"], float]
DECOYS = ("987654321", "123456789")  # of lists of all answers: right for no example


class Verifier(Component, role="verifier"):
    """Scores texts. `time_limit`: seconds a completion may take; one that takes longer scores 0 and is counted.

    Before training a verifier has to accept what `gold` gives and to score it above every one of `cheats`.
    """

    time_limit: float = Field(5.0, gt=0)

    @abstractmethod
    def score(self, text: str, example: Example) -> float:
        """The reward of a completion, without special tokens: 1 is right and 0 wrong; other finite values are allowed."""

    def opened(self, base_dir: Path) -> Judge:
        """`score`, with what it needs from files relative to `base_dir` read."""
        return self.score

    def gold(self, example: Example) -> str | None:
        """A text that has to be accepted; None where none can be known."""
        return None if example.answer is None else str(example.answer)

    def cheats(self, example: Example, golds: Sequence[str]) -> list[str]:
        """Texts that must not be accepted: nothing, and all answers at once. `golds`: of many examples."""
        listed = [DECOYS[0], *dict.fromkeys(golds), DECOYS[1]]
        return ["", ", ".join(listed), "\n".join(listed)]


def as_number(value: Any, who: str) -> float:
    """A verdict as a float. Raises DataError where it is no number, such as a text."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise DataError(f"{who} must return a number (or bool), received {value!r}.")
    return float(value)


def parse_verifier(value: Any, where: str) -> Any:
    """A verifier from `"kind"`, `{"kind": ..., settings}`, `"file.py:function"` or a verifier. Raises RecipeError."""
    if isinstance(value, str) and re.fullmatch(r".+\.py(:\w+)?", value):
        if ":" not in value:
            raise RecipeError(f"{where}: received '{value}', expected '{value}:NAME' with the function's name.")
        value = {"kind": "function", "call": value}
    return parse("verifier", value, where)
