"""A data set read, encoded and fitted."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statewise.errors import DataError
from statewise.sources.reading import Rows
from statewise.types import Author, Example, Rollout, Segment

if TYPE_CHECKING:
    from statewise.sources.dataset import WrittenSource


@dataclass(frozen=True, slots=True)
class Sample:
    """The rollouts of a row, with four bytes a token, since a data set may hold hundreds of millions."""

    example: Example
    parts: tuple[tuple[tuple[array[int], Author, bool], ...], ...]

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> Sample:
        parts = tuple(tuple((array("i", s.tokens), s.author, s.train) for s in r.segments) for r in rollouts)
        return cls(rollouts[0].example, parts)

    def rollouts(self, group: int, rewards: Sequence[float | None]) -> list[Rollout]:
        """A group of one rollout for each of `rewards`."""
        made = [tuple(Segment(tuple(tokens), author, train) for tokens, author, train in p) for p in self.parts]
        return [Rollout(s, self.example, group=group, reward=r) for s, r in zip(made, rewards, strict=True)]


@dataclass
class Prepared:
    """`counts` goes to the run record: rows = samples + bad rows + dropped."""

    samples: list[Sample] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)


def prepare(source: WrittenSource, tokenizer: Any, base_dir: Path) -> Prepared:
    """Read, encode and fit all rows. Raises DataError with file, line, field and reason."""
    rows = source.read(base_dir)
    chosen = list(zip(rows.places, rows.rows, strict=True))[: source.limit]
    num_read = rows.num_bad + len(chosen)
    building = _Building(source)
    for place, row in chosen:
        try:
            example, encoded = source.encode(tokenizer, row, place)
        except DataError as error:
            rows.reject(place, error, source.on_bad_row)
        else:
            building.add(place, example, encoded)
    building.check(rows)
    counts = {"rows": num_read, **building.counts(), "bad_rows": rows.counts()}
    return Prepared(building.samples, counts)


@dataclass
class _Building:
    """Samples under `max_length` with ids of their own, and counts of what was done to reach that."""

    source: WrittenSource
    samples: list[Sample] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    long: list[tuple[str, str, int]] = field(default_factory=list)
    truncated: int = 0
    tokens: int = 0
    supervised_tokens: int = 0

    def add(self, place: str, example: Example, encoded: Sequence[tuple[Segment, ...]]) -> None:
        self.seen[example.id] += 1
        if self.seen[example.id] > 1:
            example = replace(example, id=f"{example.id}#{self.seen[example.id]}")
        rollouts = [Rollout(segments, example) for segments in encoded]
        limit, longest = self.source.max_length, max(r.num_tokens for r in rollouts)
        if limit is not None and longest > limit:
            self.long.append((place, example.id, longest))
            rollouts = [Rollout(_truncated(segments, limit), example) for segments in encoded]
            if self.source.too_long != "truncate" or not all(r.num_action_tokens for r in rollouts):
                return
            self.truncated += 1
        self.tokens += sum(r.num_tokens for r in rollouts)
        self.supervised_tokens += sum(r.num_action_tokens for r in rollouts)
        self.samples.append(Sample.of(rollouts))

    def check(self, rows: Rows) -> None:
        """Raise for samples that are too long, where that is an error, and where nothing is left."""
        if self.source.too_long == "error" and self.long:
            place, name, size = self.long[0]
            raise DataError(
                f"{place}: sample '{name}' has {size} tokens, above source.max_length = {self.source.max_length}; "
                f"{len(self.long)} of {len(self.samples) + len(self.long)} samples are too long, the longest has "
                f"{max(size for _, _, size in self.long)} tokens. Raise it, or set source.too_long = 'drop' or 'truncate'."
            )
        if not self.samples:
            raise DataError(
                f"{self.source.data}: no sample is left (bad rows: {rows.counts()}; too long: {len(self.long)})."
            )

    def counts(self) -> dict[str, Any]:
        return {
            "samples": len(self.samples),
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "dropped_too_long": len(self.long) - self.truncated,
            "truncated": self.truncated,
            "repeated_ids": sum(count - 1 for count in self.seen.values()),
            "digest": self._digest(),
        }

    def _digest(self) -> str:
        """Of all tokens, and of which of them are trained."""
        digest = blake2b(digest_size=16)
        for sample in self.samples:
            for tokens, author, train in (segment for part in sample.parts for segment in part):
                digest.update(f"{author} {train} {len(tokens)}".encode())
                digest.update(tokens.tobytes())
        return digest.hexdigest()


def _truncated(segments: tuple[Segment, ...], length: int) -> tuple[Segment, ...]:
    """The first `length` tokens; the end token is cut with the rest."""
    kept, room = [], length
    for segment in segments:
        if room > 0:
            kept.append(Segment(segment.tokens[:room], segment.author, segment.train))
        room -= len(segment.tokens)
    return tuple(kept)
