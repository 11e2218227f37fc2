"""What every source that reads rows has in common: where they are, how they are named, in which order they come."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar
from weakref import WeakKeyDictionary

from pydantic import Field, field_validator, model_validator

from statewise.component import Source
from statewise.errors import RecipeError, nearest
from statewise.overrides import MADE
from statewise.sources.reading import Placed, Rows, find_data, find_files, is_saved, read_rows, stream_rows
from statewise.types import derive_seed

if TYPE_CHECKING:
    from statewise.types import World

KEPT = 4  # prepared data sets of a tokenizer, and orders, held at a time, such as those of a mixture
HASHED_BYTES = 1 << 20  # files up to this size are compared by content, larger ones by time and size

Made = TypeVar("Made")


class DataSource(Source):
    """Rows of a file, a directory, the hub or an embedded task.

    data: a .jsonl, .json, .parquet or .csv file, a directory, a hub id, or an embedded task such as "tiny:math".
    split: of hub ids, embedded tasks and directories; config: of hub ids, or a subdirectory.
    columns: {our name: theirs}, such as { prompt = "question", completion = "answer" }.
    chat: "auto" uses the chat template for messages and not for text; true also for text; false refuses messages.
    system: a system message for conversations that have none.
    limit: the first so many rows. count, seed, steps, style: what an embedded task is made from.
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
        for name, data in MADE.items():
            fixed = name == "style" and self.data in ("tiny:math_restyled", "tiny:math_hinted")
            if getattr(self, name) is not None and (fixed or not self.data.startswith(data)):
                owner = "embedded data such as 'tiny:math'" if data == "tiny:" else "'tiny:math'"
                raise RecipeError(f"source.{name}: belongs to {owner}, not to '{self.data}'.")
        return self

    def read(self, base_dir: Path) -> Rows:
        """All rows, before `limit`. Raises DataError."""
        return read_rows(self.data, on_bad_row=self.on_bad_row, **self._where(base_dir))

    def stream(self, base_dir: Path) -> Iterator[Placed]:
        """The first `limit` rows one after the other, each with its place, or what is wrong with it."""
        return islice(stream_rows(self.data, **self._where(base_dir)), self.limit)

    def _where(self, base_dir: Path) -> dict[str, Any]:
        steps = None if self.steps is None else tuple(self.steps)
        made = {"count": self.count, "seed": self.seed, "steps": steps, "style": self.style}
        return {"split": self.split, "config": self.config, "base_dir": base_dir, "tiny": made}

    def places(self, start: int, stop: int, size: int, seed: int) -> list[int]:
        """Numbers of the items start .. stop - 1 of the endless sequence of epochs, each epoch in an order of its own."""
        turns = [divmod(place, size) for place in range(start, stop)]
        return [self._order(epoch, size, seed)[index] for epoch, index in turns]

    def _order(self, epoch: int, size: int, seed: int) -> Sequence[int]:
        return _shuffled(size, derive_seed(seed, "dataset", epoch)) if self.shuffle else range(size)


@lru_cache(maxsize=KEPT)
def _shuffled(size: int, seed: int) -> list[int]:
    """A permutation as a function of (size, seed)."""
    order = list(range(size))
    Random(seed).shuffle(order)
    return order


_MADE: WeakKeyDictionary[Any, OrderedDict[Any, Any]] = WeakKeyDictionary()


def made_once(source: DataSource, world: World, make: Callable[[], Made]) -> Made:
    """What `make` makes of the source's rows; made again where source, tokenizer or files are other than before."""
    tokenizer = world.tokenizer
    texts = (tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    key = (source.kind, source.model_dump_json(), str(world.base_dir), texts, _signature(source, world.base_dir))
    known = _MADE.setdefault(tokenizer, OrderedDict())
    if key not in known:
        known[key] = make()
        while len(known) > KEPT:
            known.popitem(last=False)
    made: Made = known[key]
    return made


def _signature(source: DataSource, base_dir: Path) -> Any:
    path = None if source.data.startswith("tiny:") else find_data(source.data, base_dir)
    if path is None:
        return None
    if is_saved(path):
        files = [path / name for name in ("state.json", "dataset_dict.json") if (path / name).is_file()]
    else:
        files = [path] if path.is_file() else find_files(path, source.split, source.config)
    return tuple((str(file), _state(file)) for file in files)


def _state(file: Path) -> Any:
    facts = file.stat()
    if facts.st_size <= HASHED_BYTES:
        return blake2b(file.read_bytes(), digest_size=16).digest()
    return facts.st_mtime_ns, facts.st_size
