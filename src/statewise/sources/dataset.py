"""The states of a data set: prompts and the answers that were written for them."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from statewise.component import Source
from statewise.errors import DataError, RecipeError, nearest
from statewise.sources.reading import Rows, read_rows
from statewise.sources.rows import encode_row, example_of
from statewise.sources.templates import preview
from statewise.types import Example, Rollout, Segment, derive_seed

if TYPE_CHECKING:
    from statewise.types import World

FIELDS = ("prompt", "completion", "messages", "text", "answer", "id", "system")
KEPT_DATASETS = 4  # encoded data sets held at a time, such as the parts of a mixture


class DatasetSource(Source, kind="dataset"):
    """Rows in TRL's formats: `prompt` and `completion` (text or messages), `messages`, or `text`.

    data: a .jsonl, .json, .parquet or .csv file, a directory, a hub id, or an embedded task such as "tiny:math".
    columns: {our name: theirs}, such as { prompt = "question", completion = "answer" }.
    chat: "auto" uses the chat template for messages and not for text; true also for text.
    remove: regular expressions whose matches are deleted from the completion, such as GSM8K's '<<[^>]*>>'.
    too_long: what happens to samples above max_length tokens: "error", "drop" or "truncate" (the end is cut, with it EOS).
    """

    writes: ClassVar[tuple[str, ...]] = ("gold",)

    data: str
    split: str = "train"
    config: str | None = None
    columns: dict[str, str] = {}
    chat: bool | Literal["auto"] = "auto"
    system: str | None = None
    remove: list[str] = []
    max_length: int = Field(1024, ge=2)
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
        made = {"count": self.count, "seed": self.seed, "steps": self.steps, "style": self.style}
        given = [name for name, value in made.items() if value is not None]
        if given and not self.data.startswith("tiny:"):
            raise RecipeError(f"source.{given[0]}: belongs to embedded data such as 'tiny:math', not to '{self.data}'.")
        return self

    def num_examples(self, world: World) -> int:
        prepared = _prepared(self, world)
        world.record({"source": self.data, **prepared.counts})
        return len(prepared.samples)

    def sample(self, step: int, num_rollouts: int, world: World) -> list[Rollout]:
        """Samples number step * n ... of the endless sequence of epochs, each epoch in an order of its own."""
        samples = _prepared(self, world).samples
        rollouts = []
        for place in range(step * num_rollouts, (step + 1) * num_rollouts):
            epoch, index = divmod(place, len(samples))
            segments, example = samples[self._order(epoch, len(samples), world.seed)[index]]
            rollouts.append(Rollout(segments, example, group=place - step * num_rollouts))
        return rollouts

    def _order(self, epoch: int, size: int, seed: int) -> Sequence[int]:
        if not self.shuffle:
            return range(size)
        return _shuffled(size, derive_seed(seed, "dataset", epoch))


@dataclass
class _Prepared:
    samples: list[tuple[tuple[Segment, ...], Example]] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)


_ORDERS: OrderedDict[tuple[int, int], list[int]] = OrderedDict()
_CACHE: OrderedDict[tuple[Any, ...], tuple[Any, _Prepared]] = OrderedDict()


def _shuffled(size: int, seed: int) -> list[int]:
    """A permutation as a function of (size, seed); the last few are kept."""
    key = (size, seed)
    if key not in _ORDERS:
        order = list(range(size))
        Random(seed).shuffle(order)
        _ORDERS[key] = order
        while len(_ORDERS) > KEPT_DATASETS:
            _ORDERS.popitem(last=False)
    return _ORDERS[key]


def _prepared(source: DatasetSource, world: World) -> _Prepared:
    """The encoded data set; read once for a source and a tokenizer."""
    key = (source.model_dump_json(), id(world.tokenizer), world.tokenizer.chat_template, str(world.base_dir))
    if key not in _CACHE:
        # The tokenizer is kept beside the data, so that its id can't be another one's meanwhile.
        _CACHE[key] = (world.tokenizer, _prepare(source, world.tokenizer, world.base_dir))
        while len(_CACHE) > KEPT_DATASETS:
            _CACHE.popitem(last=False)
    return _CACHE[key][1]


def _prepare(source: DatasetSource, tokenizer: Any, base_dir: Path) -> _Prepared:
    steps = None if source.steps is None else tuple(source.steps)
    made = {"count": source.count, "seed": source.seed, "steps": steps, "style": source.style}
    rows = read_rows(
        source.data,
        split=source.split,
        config=source.config,
        base_dir=base_dir,
        on_bad_row=source.on_bad_row,
        tiny=made,
    )
    out, seen = _Prepared(), set[str]()
    dropped: list[str] = []
    truncated: list[str] = []
    for place, row in list(zip(rows.places, rows.rows, strict=True))[: source.limit]:
        try:
            example = example_of(source, row, place)
            segments = encode_row(source, tokenizer, row)
        except DataError as error:
            rows.reject(place, str(error).rstrip("."), source.on_bad_row)
            continue
        if example.id in seen:
            rows.reject(place, f"id: '{example.id}' occurs twice", source.on_bad_row)
            continue
        seen.add(example.id)
        segments = _fitted(source, segments, place, example.id, dropped, truncated)
        if segments:
            _supervised(tokenizer, segments, example, place)
            out.samples.append((segments, example))
    if not out.samples:
        raise DataError(f"{source.data}: no sample is left (bad rows {rows.counts()}, too long {len(dropped)}).")
    out.counts = _counts(rows, out, dropped, truncated)
    return out


def _counts(rows: Rows, out: _Prepared, dropped: list[str], truncated: list[str]) -> dict[str, Any]:
    tokens = [Rollout(segments, example) for segments, example in out.samples]
    return {
        "rows": len(rows.rows),
        "samples": len(out.samples),
        "tokens": sum(r.num_tokens for r in tokens),
        "supervised_tokens": sum(r.num_action_tokens for r in tokens),
        "bad_rows": rows.counts(),
        "dropped_too_long": len(dropped),
        "truncated": len(truncated),
    }


def _fitted(
    source: DatasetSource,
    segments: tuple[Segment, ...],
    place: str,
    name: str,
    dropped: list[str],
    truncated: list[str],
) -> tuple[Segment, ...]:
    """The segments under `max_length`; empty where the sample is dropped."""
    size = sum(len(s.tokens) for s in segments)
    if size <= source.max_length:
        return segments
    if source.too_long == "error":
        raise DataError(
            f"{place}: sample '{name}' has {size} tokens, above source.max_length = {source.max_length}; raise it, or set "
            "source.too_long = 'drop' or 'truncate'."
        )
    if source.too_long == "drop":
        dropped.append(name)
        return ()
    cut = _truncate(segments, source.max_length)
    if not any(s.train for s in cut):
        dropped.append(name)
        return ()
    truncated.append(name)
    return cut


def _truncate(segments: tuple[Segment, ...], length: int) -> tuple[Segment, ...]:
    kept, room = [], length
    for segment in segments:
        if room > 0:
            kept.append(Segment(segment.tokens[:room], segment.author, segment.train))
        room -= len(segment.tokens)
    return tuple(kept)


def _supervised(tokenizer: Any, segments: tuple[Segment, ...], example: Example, place: str) -> None:
    rollout = Rollout(segments, example)
    if rollout.num_action_tokens == 0:
        raise DataError(
            f"{place}: sample '{example.id}' has no supervised token, so it would train nothing. Supervised text is "
            f"marked ⟦so⟧; this sample is: {preview(tokenizer, rollout)!r}"
        )
