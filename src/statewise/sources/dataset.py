"""The states of a data set: prompts and the answers that were written for them."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from statewise.errors import DataError, RecipeError
from statewise.sources.data import DataSource, made_once
from statewise.sources.reading import Rows
from statewise.sources.rows import encode_row, example_of
from statewise.sources.templates import preview
from statewise.types import Example, Rollout, Segment

if TYPE_CHECKING:
    from statewise.types import World

Segments = tuple[Segment, ...]


class WrittenSource(DataSource):
    """Rows whose completions were written beforehand; a row is a group of one rollout for each of `rewards`.

    remove: regular expressions whose matches are deleted from the completion, such as GSM8K's '<<[^>]*>>'.
    too_long: what happens to samples above max_length tokens: "error", "drop" or "truncate" (the end is cut, with it EOS).
    """

    rewards: ClassVar[tuple[float | None, ...]] = (None,)

    remove: list[str] = []
    max_length: int = Field(1024, ge=2)
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
    def encode(self, tokenizer: Any, row: Mapping[str, Any]) -> tuple[Segments, ...]:
        """The row's rollouts. Raises DataError."""

    def num_examples(self, world: World) -> int:
        """Rollouts in a pass through the rows."""
        prepared = self._read(world)
        world.record({"source": self.data, **prepared.counts})
        return len(prepared.samples) * len(self.rewards)

    def examples(self, world: World) -> list[Example]:
        return [example for _, example in self._read(world).samples]

    def sample(self, step: int, num_rollouts: int, world: World) -> list[Rollout]:
        """The rows number step * n ... of the endless sequence of epochs, each epoch in an order of its own."""
        samples, size = self._read(world).samples, len(self.rewards)
        if num_rollouts % size:
            raise RecipeError(
                f"source '{self.kind}': received {num_rollouts} rollouts for a step, expected a multiple of {size}, "
                "since a row has so many."
            )
        rows = num_rollouts // size
        places = self.places(step * rows, (step + 1) * rows, len(samples), world.seed)
        return [
            Rollout(segments, samples[place][1], group=index, reward=reward)
            for index, place in enumerate(places)
            for segments, reward in zip(samples[place][0], self.rewards, strict=True)
        ]

    def _read(self, world: World) -> _Prepared:
        return made_once(self, world, lambda: _prepare(self, world.tokenizer, world.base_dir))


class DatasetSource(WrittenSource, kind="dataset"):
    """Rows in TRL's formats: `prompt` and `completion` (text or messages), `messages`, or `text`."""

    writes: ClassVar[tuple[str, ...]] = ("gold",)

    def encode(self, tokenizer: Any, row: Mapping[str, Any]) -> tuple[Segments, ...]:
        return (encode_row(self, tokenizer, row),)


@dataclass
class _Prepared:
    samples: list[tuple[tuple[Segments, ...], Example]] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)


def _prepare(source: WrittenSource, tokenizer: Any, base_dir: Path) -> _Prepared:
    rows = source.read(base_dir)
    out, seen = _Prepared(), set[str]()
    dropped: list[str] = []
    truncated: list[str] = []
    for place, row in list(zip(rows.places, rows.rows, strict=True))[: source.limit]:
        try:
            example = example_of(source, row, place)
            encoded = source.encode(tokenizer, row)
        except DataError as error:
            rows.reject(place, str(error).rstrip("."), source.on_bad_row)
            continue
        if example.id in seen:
            rows.reject(place, f"id: '{example.id}' occurs twice", source.on_bad_row)
            continue
        seen.add(example.id)
        fitted = tuple(_fitted(source, segments, place, example.id, dropped, truncated) for segments in encoded)
        if all(fitted):
            for segments in fitted:
                _supervised(tokenizer, segments, example, place)
            out.samples.append((fitted, example))
    if not out.samples:
        raise DataError(f"{source.data}: no sample is left (bad rows {rows.counts()}, too long {len(dropped)}).")
    out.counts = _counts(rows, out, dropped, truncated)
    return out


def _counts(rows: Rows, out: _Prepared, dropped: list[str], truncated: list[str]) -> dict[str, Any]:
    flat = [Rollout(segments, example) for group, example in out.samples for segments in group]
    return {
        "rows": len(rows.rows),
        "samples": len(out.samples),
        "tokens": sum(r.num_tokens for r in flat),
        "supervised_tokens": sum(r.num_action_tokens for r in flat),
        "bad_rows": rows.counts(),
        "dropped_too_long": len(dropped),
        "truncated": len(truncated),
    }


def _fitted(
    source: WrittenSource,
    segments: Segments,
    place: str,
    name: str,
    dropped: list[str],
    truncated: list[str],
) -> Segments:
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


def _truncate(segments: Segments, length: int) -> Segments:
    kept, room = [], length
    for segment in segments:
        if room > 0:
            kept.append(Segment(segment.tokens[:room], segment.author, segment.train))
        room -= len(segment.tokens)
    return tuple(kept)


def _supervised(tokenizer: Any, segments: Segments, example: Example, place: str) -> None:
    rollout = Rollout(segments, example)
    if rollout.num_action_tokens == 0:
        raise DataError(
            f"{place}: sample '{example.id}' has no supervised token, so it would train nothing. Supervised text is "
            f"marked ⟦so⟧; this sample is: {preview(tokenizer, rollout)!r}"
        )
