"""What every source that reads rows has in common: where they are, how they are named, in which order they come."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from statewise.component import Source
from statewise.errors import RecipeError, nearest
from statewise.sources.reading import Rows, read_rows
from statewise.types import derive_seed

if TYPE_CHECKING:
    from statewise.types import World

KEPT = 4  # prepared data sets, and orders of one, held at a time, such as those of a mixture

Made = TypeVar("Made")


class DataSource(Source):
    """Rows of a file, a directory, the hub or an embedded task.

    data: a .jsonl, .json, .parquet or .csv file, a directory, a hub id, or an embedded task such as "tiny:math".
    columns: {our name: theirs}, such as { prompt = "question", completion = "answer" }.
    chat: "auto" uses the chat template for messages and not for text; true also for text.
    """

    fields: ClassVar[tuple[str, ...]] = ("prompt", "completion", "messages", "text", "answer", "id", "system")

    data: str
    split: str = "train"
    config: str | None = None
    columns: dict[str, str] = {}
    chat: bool | Literal["auto"] = "auto"
    system: str | None = None
    on_bad_row: Literal["error", "skip"] = "error"
    limit: int | None = Field(None, ge=1)
    shuffle: bool = True
    count: int | None = Field(None, ge=1)
    seed: int | None = None
    steps: list[int] | None = None
    style: str | None = None

    @field_validator("columns")
    @classmethod
    def _known(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if name not in cls.fields:
                raise RecipeError(f"source.columns: unknown name '{name}'{nearest(name, cls.fields)}")
        return value

    @model_validator(mode="after")
    def _tiny_only(self) -> DataSource:
        made = {"count": self.count, "seed": self.seed, "steps": self.steps, "style": self.style}
        given = [name for name, value in made.items() if value is not None]
        if given and not self.data.startswith("tiny:"):
            raise RecipeError(f"source.{given[0]}: belongs to embedded data such as 'tiny:math', not to '{self.data}'.")
        return self

    def read(self, base_dir: Path) -> Rows:
        """All rows, before `limit`. Raises DataError."""
        steps = None if self.steps is None else tuple(self.steps)
        made = {"count": self.count, "seed": self.seed, "steps": steps, "style": self.style}
        return read_rows(
            self.data,
            split=self.split,
            config=self.config,
            base_dir=base_dir,
            on_bad_row=self.on_bad_row,
            tiny=made,
        )

    def places(self, start: int, stop: int, size: int, seed: int) -> list[int]:
        """Numbers of the items start .. stop - 1 of the endless sequence of epochs, each epoch in an order of its own."""
        turns = [divmod(place, size) for place in range(start, stop)]
        return [self._order(epoch, size, seed)[index] for epoch, index in turns]

    def _order(self, epoch: int, size: int, seed: int) -> Sequence[int]:
        return _shuffled(size, derive_seed(seed, "dataset", epoch)) if self.shuffle else range(size)


_ORDERS: OrderedDict[tuple[int, int], list[int]] = OrderedDict()
_MADE: OrderedDict[tuple[Any, ...], tuple[Any, Any]] = OrderedDict()


def _shuffled(size: int, seed: int) -> list[int]:
    """A permutation as a function of (size, seed); the last few are kept."""
    key = (size, seed)
    if key not in _ORDERS:
        order = list(range(size))
        Random(seed).shuffle(order)
        _keep(_ORDERS, key, order)
    return _ORDERS[key]


def made_once(source: DataSource, world: World, make: Callable[[], Made]) -> Made:
    """What `make` makes of the source's rows, made once for a source and a tokenizer."""
    tokenizer = world.tokenizer
    key = (source.kind, source.model_dump_json(), id(tokenizer), tokenizer.chat_template, str(world.base_dir))
    if key not in _MADE:
        # The tokenizer is kept beside what was made, so that its id can't be another one's meanwhile.
        _keep(_MADE, key, (tokenizer, make()))
    return _MADE[key][1]


def _keep(kept: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    kept[key] = value
    while len(kept) > KEPT:
        kept.popitem(last=False)
