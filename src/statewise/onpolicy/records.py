"""Scored samples as Parquet: a row a sample in the order of the input, with its record and its tokens.

index, place, id      row number (from 0) and "file:line" of the input
num_tokens ...        the record, see `cll.summarise`
tokens                ids of the whole sequence; positions: which of them were scored
phi, logprobs, entropy, varentropy, rank    one value a scored token
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from statewise.errors import DataError
from statewise.onpolicy.cll import SHARES, TokenStatistics, summarise

RECORD = (
    *("mean_phi", "sum_phi", "min_phi"),
    *SHARES,
    *("z", "sum_square", "sum_varentropy", "sum_square_variance"),
    *("mean_logprob", "mean_entropy", "mean_log_rank", "perplexity"),
)
LISTS = ("phi", "logprobs", "entropy", "varentropy", "rank")
NAMES = ("index", "place", "id", "num_tokens", *RECORD)


@dataclass(frozen=True)
class Sample:
    """A scored sample."""

    index: int
    place: str
    id: str
    tokens: Sequence[int]
    statistics: TokenStatistics

    def record(self) -> dict[str, Any]:
        return {"index": self.index, "place": self.place, "id": self.id, **summarise(self.statistics)}


@dataclass(frozen=True)
class Bad:
    """A row that was left out. `reason` is the same for rows of a kind."""

    index: int
    place: str
    reason: str
    message: str


@dataclass(frozen=True)
class Chunk:
    """What became of consecutive rows of the input. `facts`: how much was read and how long it took."""

    samples: list[Sample]
    bad: list[Bad]
    facts: Mapping[str, float]

    def to_parquet(self) -> bytes:
        """The samples as a Parquet file whose metadata hold the rest."""
        from pyarrow import parquet

        told = {"bad": [vars(b) for b in self.bad], "facts": dict(self.facts)}
        table = self._table().replace_schema_metadata({"statewise": json.dumps(told)})
        buffer = io.BytesIO()
        parquet.write_table(table, buffer, compression="zstd")
        return buffer.getvalue()

    def _table(self) -> Any:
        import pyarrow

        records = [s.record() for s in self.samples]
        columns: dict[str, Any] = {name: [r[name] for r in records] for name in NAMES}
        columns["tokens"] = [list(s.tokens) for s in self.samples]
        columns["positions"] = [s.statistics.positions for s in self.samples]
        columns |= {name: [getattr(s.statistics, name) for s in self.samples] for name in LISTS}
        return pyarrow.table(columns, schema=schema())


def schema() -> Any:
    import pyarrow

    texts = {"place": pyarrow.string(), "id": pyarrow.string()}
    whole = {"index": pyarrow.int64(), "num_tokens": pyarrow.int32()}
    fields = [(name, texts.get(name) or whole.get(name) or pyarrow.float64()) for name in NAMES]
    fields += [(name, pyarrow.list_(pyarrow.int32())) for name in ("tokens", "positions")]
    kinds = {"rank": pyarrow.int32()}
    return pyarrow.schema([*fields, *((name, pyarrow.list_(kinds.get(name, pyarrow.float32()))) for name in LISTS)])


def told_of(part: Path) -> tuple[list[Bad], dict[str, float]]:
    """The rows that a stored chunk left out, and its facts."""
    from pyarrow import parquet

    told = json.loads(parquet.read_schema(part).metadata[b"statewise"])
    return [Bad(**b) for b in told["bad"]], told["facts"]


def join(parts: Iterable[Path], target: Path) -> None:
    """One Parquet file from stored chunks, a row group each; what a crash leaves has another name."""
    from pyarrow import parquet

    from statewise.files import written_aside

    with written_aside(target) as aside, parquet.ParquetWriter(aside, schema(), compression="zstd") as writer:
        for part in parts:
            table = parquet.read_table(part).replace_schema_metadata(None)
            if table.num_rows:
                writer.write_table(table, row_group_size=table.num_rows)


def batches(file: Path, columns: Sequence[str], size: int = 1024) -> Iterator[dict[str, Any]]:
    """{column: list, or array of numbers} of up to `size` samples at a time."""
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=size, columns=list(columns)):
                yield {name: _values(batch.column(name)) for name in columns}
    except (ArrowException, OSError, KeyError) as error:
        raise DataError(f"{file}: is no file of scored samples: {error}") from None


def _values(column: Any) -> Any:
    import pyarrow

    if pyarrow.types.is_list(column.type):
        offsets, flat = column.offsets.to_numpy(), column.values.to_numpy(zero_copy_only=False)
        return [flat[a:b] for a, b in pairwise(offsets)]
    if pyarrow.types.is_string(column.type):
        return column.to_pylist()
    return np.asarray(column.to_numpy(zero_copy_only=False))
