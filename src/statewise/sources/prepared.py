"""A data set read, encoded and fitted, once for a source and a tokenizer."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from statewise.errors import DataError
from statewise.sources.reading import Rows, find_data, find_files, is_saved, read_rows
from statewise.sources.rows import encode_row
from statewise.types import Author, Example, Rollout, Segment

if TYPE_CHECKING:
    from statewise.sources.dataset import DatasetSource
    from statewise.types import World

KEPT_DATASETS = 4  # encoded data sets held at a time for a tokenizer, such as the parts of a mixture
HASHED_BYTES = 1 << 20  # files up to this size are compared by content, larger ones by time and size


@dataclass(frozen=True, slots=True)
class Sample:
    """Segments with four bytes a token, since a data set may hold hundreds of millions."""

    example: Example
    parts: tuple[tuple[array[int], Author, bool], ...]

    @classmethod
    def of(cls, rollout: Rollout) -> Sample:
        return cls(rollout.example, tuple((array("i", s.tokens), s.author, s.train) for s in rollout.segments))

    def rollout(self, group: int = 0) -> Rollout:
        segments = tuple(Segment(tuple(tokens), author, train) for tokens, author, train in self.parts)
        return Rollout(segments, self.example, group=group)


@dataclass
class Prepared:
    """`counts` goes to the run record: rows = samples + bad rows + dropped."""

    samples: list[Sample] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)


_CACHE: WeakKeyDictionary[Any, OrderedDict[Any, Prepared]] = WeakKeyDictionary()


def prepared(source: DatasetSource, world: World) -> Prepared:
    """The encoded data set; it is read again where source, tokenizer or files are other than before."""
    tokenizer = world.tokenizer
    texts = (tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    key = (source.model_dump_json(), str(world.base_dir), texts, _signature(source, world.base_dir))
    known = _CACHE.setdefault(tokenizer, OrderedDict())
    if key not in known:
        known[key] = prepare(source, tokenizer, world.base_dir)
        while len(known) > KEPT_DATASETS:
            known.popitem(last=False)
    return known[key]


def _signature(source: DatasetSource, base_dir: Path) -> Any:
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


def prepare(source: DatasetSource, tokenizer: Any, base_dir: Path) -> Prepared:
    """Read, encode and fit all rows. Raises DataError with file, line, field and reason."""
    steps = None if source.steps is None else tuple(source.steps)
    rows = read_rows(
        source.data,
        split=source.split,
        config=source.config,
        base_dir=base_dir,
        on_bad_row=source.on_bad_row,
        tiny={"count": source.count, "seed": source.seed, "steps": steps, "style": source.style},
    )
    chosen = list(zip(rows.places, rows.rows, strict=True))[: source.limit]
    num_read = rows.num_bad + len(chosen)
    building = _Building(source)
    for place, row in chosen:
        try:
            example, segments = encode_row(source, tokenizer, row, place)
        except DataError as error:
            rows.reject(place, error, source.on_bad_row)
        else:
            building.add(place, example, segments)
    building.check(rows)
    counts = {"rows": num_read, **building.counts(), "bad_rows": rows.counts()}
    return Prepared(building.samples, counts)


@dataclass
class _Building:
    """Samples under `max_length` with ids of their own, and counts of what was done to reach that."""

    source: DatasetSource
    samples: list[Sample] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    long: list[tuple[str, str, int]] = field(default_factory=list)
    truncated: int = 0
    tokens: int = 0
    supervised_tokens: int = 0

    def add(self, place: str, example: Example, segments: tuple[Segment, ...]) -> None:
        self.seen[example.id] += 1
        if self.seen[example.id] > 1:
            example = replace(example, id=f"{example.id}#{self.seen[example.id]}")
        rollout = Rollout(segments, example)
        limit = self.source.max_length
        if limit is not None and rollout.num_tokens > limit:
            self.long.append((place, example.id, rollout.num_tokens))
            rollout = Rollout(_truncated(segments, limit), example)
            if self.source.too_long != "truncate" or rollout.num_action_tokens == 0:
                return
            self.truncated += 1
        self.tokens += rollout.num_tokens
        self.supervised_tokens += rollout.num_action_tokens
        self.samples.append(Sample.of(rollout))

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
        }


def _truncated(segments: tuple[Segment, ...], length: int) -> tuple[Segment, ...]:
    """The first `length` tokens; the end token is cut with the rest."""
    kept, room = [], length
    for segment in segments:
        if room > 0:
            kept.append(Segment(segment.tokens[:room], segment.author, segment.train))
        room -= len(segment.tokens)
    return tuple(kept)
