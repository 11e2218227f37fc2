"""The states of a data set: prompts and the answers that were written for them."""

from __future__ import annotations

import re
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


class DatasetSource(DataSource, kind="dataset"):
    """Rows in TRL's formats: `prompt` and `completion` (text or messages), `messages`, or `text`.

    remove: regular expressions whose matches are deleted from the completion, such as GSM8K's '<<[^>]*>>'.
    too_long: what happens to samples above max_length tokens: "error", "drop" or "truncate" (the end is cut, with it EOS).
    """

    writes: ClassVar[tuple[str, ...]] = ("gold",)

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

    def num_examples(self, world: World) -> int:
        prepared = self._read(world)
        world.record({"source": self.data, **prepared.counts})
        return len(prepared.samples)

    def examples(self, world: World) -> list[Example]:
        return [example for _, example in self._read(world).samples]

    def sample(self, step: int, num_rollouts: int, world: World) -> list[Rollout]:
        """Samples number step * n ... of the endless sequence of epochs, each epoch in an order of its own."""
        samples = self._read(world).samples
        places = self.places(step * num_rollouts, (step + 1) * num_rollouts, len(samples), world.seed)
        return [Rollout(*samples[place], group=index) for index, place in enumerate(places)]

    def _read(self, world: World) -> _Prepared:
        return made_once(self, world, lambda: _prepare(self, world.tokenizer, world.base_dir))


@dataclass
class _Prepared:
    samples: list[tuple[tuple[Segment, ...], Example]] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)


def _prepare(source: DatasetSource, tokenizer: Any, base_dir: Path) -> _Prepared:
    rows = source.read(base_dir)
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
