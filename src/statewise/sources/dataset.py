"""The states of a data set: prompts and the answers that were written for them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from statewise.component import Source
from statewise.errors import RecipeError, nearest
from statewise.sources.prepared import prepared
from statewise.sources.rows import FIELDS
from statewise.types import Rollout, derive_seed

if TYPE_CHECKING:
    from statewise.types import World


class DatasetSource(Source, kind="dataset"):
    """Rows in TRL's formats: `prompt` and `completion` (text or messages), `messages`, or `text`.

    data: a .jsonl, .json, .parquet or .csv file, a directory, a hub id, or an embedded task such as "tiny:math".
    split: of hub ids, embedded tasks and directories; config: of hub ids, or a subdirectory.
    columns: {our name: theirs}, such as { prompt = "question", completion = "answer" }.
    chat: "auto" uses the chat template for messages and not for text; true also for text; false refuses messages.
    system: a system message for conversations that have none.
    remove: regular expressions whose matches are deleted from what is supervised, such as GSM8K's '<<[^>]*>>'.
    too_long: what happens to samples above max_length tokens: "error", "drop" or "truncate" (the end is cut, with it EOS).
    limit: the first so many rows. count, seed, steps, style: what an embedded task is made from.
    """

    writes: ClassVar[tuple[str, ...]] = ("gold",)

    data: str
    split: str = "train"
    config: str | None = None
    columns: dict[str, str] = {}
    chat: bool | Literal["auto"] = "auto"
    system: str | None = None
    remove: list[str] = []
    max_length: int | None = Field(1024, ge=2)
    too_long: Literal["error", "drop", "truncate"] = "error"
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
            if name not in FIELDS:
                raise RecipeError(f"source.columns: unknown name '{name}'{nearest(name, FIELDS)}")
        return value

    @field_validator("remove")
    @classmethod
    def _compiles(cls, value: list[str]) -> list[str]:
        for pattern in value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise RecipeError(f"source.remove: '{pattern}' is no regular expression: {error}.") from None
        return value

    @model_validator(mode="after")
    def _tiny_only(self) -> DatasetSource:
        made = {"count": "tiny:", "seed": "tiny:", "steps": "tiny:math", "style": "tiny:math"}
        for name, data in made.items():
            if getattr(self, name) is not None and not self.data.startswith(data):
                owner = "embedded data such as 'tiny:math'" if data == "tiny:" else "'tiny:math'"
                raise RecipeError(f"source.{name}: belongs to {owner}, not to '{self.data}'.")
        return self

    def num_examples(self, world: World) -> int:
        """The usable rows; their counts go to the run record."""
        found = prepared(self, world)
        world.record({"source": self.data, **found.counts})
        return len(found.samples)

    def sample(self, step: int, num_rollouts: int, world: World) -> list[Rollout]:
        """Samples number step * n ... of the endless sequence of epochs, each epoch in an order of its own."""
        samples = prepared(self, world).samples
        rollouts = []
        for group in range(num_rollouts):
            epoch, place = divmod(step * num_rollouts + group, len(samples))
            rollouts.append(samples[self._order(epoch, len(samples), world.seed)[place]].rollout(group))
        return rollouts

    def _order(self, epoch: int, size: int, seed: int) -> Sequence[int]:
        return _shuffled(size, derive_seed(seed, "dataset", epoch)) if self.shuffle else range(size)


@lru_cache(maxsize=4)
def _shuffled(size: int, seed: int) -> list[int]:
    order = list(range(size))
    Random(seed).shuffle(order)
    return order
