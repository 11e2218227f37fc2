"""The states of a data set: prompts and the answers that were written for them."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from statewise.errors import RecipeError
from statewise.sources.data import DataSource, made_once
from statewise.sources.prepared import Prepared, prepare
from statewise.sources.reading import Row
from statewise.sources.rows import encode_row
from statewise.types import Example, Rollout, Segment

if TYPE_CHECKING:
    from statewise.types import World

Segments = tuple[Segment, ...]


class WrittenSource(DataSource):
    """Rows whose completions were written beforehand; a row is a group of one rollout for each of `rewards`.

    remove: regular expressions whose matches are deleted from what is supervised, such as GSM8K's '<<[^>]*>>'.
    too_long: what happens to samples above max_length tokens: "error", "drop" or "truncate" (the end is cut, with it EOS).
    """

    rewards: ClassVar[tuple[float | None, ...]] = (None,)

    remove: list[str] = []
    max_length: int | None = Field(1024, ge=2)
    too_long: Literal["error", "drop", "truncate"] = "error"

    @field_validator("remove")
    @classmethod
    def _compiles(cls, value: list[str]) -> list[str]:
        for pattern in value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise RecipeError(f"source.remove: '{pattern}' is no regular expression: {error}.") from None
        return value

    @property
    def group_size(self) -> int:
        return len(self.rewards)

    @abstractmethod
    def encode(self, tokenizer: Any, row: Row, place: str) -> tuple[Example, tuple[Segments, ...]]:
        """The row as an example and its rollouts. Raises DataError."""

    def num_examples(self, world: World) -> int:
        """Rollouts in a pass through the usable rows; the counts of rows go to the run record."""
        found = self._read(world)
        world.record({"source": self.data, **found.counts})
        return len(found.samples) * self.group_size

    def examples(self, world: World) -> list[Example]:
        return [sample.example for sample in self._read(world).samples]

    def sample(self, step: int, num_rollouts: int, world: World) -> list[Rollout]:
        """The rows number step * n ... of the endless sequence of epochs, each epoch in an order of its own."""
        samples, size = self._read(world).samples, self.group_size
        if num_rollouts % size:
            raise RecipeError(
                f"source '{self.kind}': received {num_rollouts} rollouts for a step, expected a multiple of {size}, "
                "since a row has so many."
            )
        rows = num_rollouts // size
        places = self.places(step * rows, (step + 1) * rows, len(samples), world.seed)
        return [r for group, at in enumerate(places) for r in samples[at].rollouts(group, self.rewards)]

    def _read(self, world: World) -> Prepared:
        return made_once(self, world, lambda: prepare(self, world.tokenizer, world.base_dir))


class DatasetSource(WrittenSource, kind="dataset"):
    """Rows in TRL's formats: `prompt` and `completion` (text or messages), `messages`, or `text`."""

    writes: ClassVar[tuple[str, ...]] = ("gold",)

    def encode(self, tokenizer: Any, row: Row, place: str) -> tuple[Example, tuple[Segments, ...]]:
        example, segments = encode_row(self, tokenizer, row, place)
        return example, (segments,)
