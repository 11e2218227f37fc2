"""A row that was realigned, as Parquet holds it, and as a row of a data set."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from statewise.files import atomic_write, to_json, written_aside
from statewise.sources.realigning import KEPT, Kind

Ids = Sequence[int]
Floats = Sequence[float]


@dataclass(frozen=True)
class Realigned:
    """Of a row: what was asked, the answer it had, and what became of it. phi is the plain stream's, nats, a value a token.

    prompt: text or messages; answer: the reference. original: the row's answer; text: what is kept, else the last that was
    tried; weights: lambda of each of its tokens; alone: what the imitator writes without the plain stream, where it was asked.
    """

    index: int
    id: str
    kind: Kind
    prompt: Any
    answer: Any
    reward: float | None
    stop_reason: str | None
    delimiter_at: int | None
    prompt_ids: Ids
    original_ids: Ids
    original_phi: Floats
    text_ids: Ids
    text_phi: Floats
    text_weights: Floats
    alone_ids: Ids = ()
    alone_phi: Floats = ()

    @property
    def is_kept(self) -> bool:
        return self.kind in KEPT

    def to_row(self, tokenizer: Any) -> dict[str, Any]:
        """In TRL's formats, text and tokens: `statewise train` takes the tokens as they are."""
        text = str(tokenizer.decode(list(self.text_ids), skip_special_tokens=True))
        told = isinstance(self.prompt, list)
        return {
            "id": self.id,
            "prompt": self.prompt,
            "completion": [{"role": "assistant", "content": text}] if told else text,
            "answer": self.answer,
            "kind": self.kind,
            "reward": self.reward,
            "phi_before": mean(self.original_phi),
            "phi_after": mean(self.text_phi),
            "input_ids": [*self.prompt_ids, *self.text_ids],
            "completion_mask": [0] * len(self.prompt_ids) + [1] * len(self.text_ids),
        }


def mean(values: Floats) -> float | None:
    return float(np.mean(values)) if len(values) else None


JSON_COLUMNS = ("prompt", "answer")


def _schema() -> Any:
    import pyarrow as pa

    kinds = {
        "int": pa.int64(),
        "str": pa.string(),
        "Kind": pa.string(),
        "Any": pa.string(),
        "float | None": pa.float64(),
    }
    kinds |= {"str | None": pa.string(), "int | None": pa.int64()}
    kinds |= {"Ids": pa.list_(pa.int32()), "Floats": pa.list_(pa.float32())}
    return pa.schema([(f.name, kinds[str(f.type)]) for f in fields(Realigned)])


def _table(rows: Sequence[Realigned]) -> Any:
    import pyarrow as pa

    plain = [asdict(row) for row in rows]
    for row in plain:
        row |= {name: to_json(row[name]) for name in JSON_COLUMNS}
    return pa.Table.from_pylist(plain, schema=_schema())


def write_part(path: Path, rows: Sequence[Realigned]) -> None:
    """The rows as one Parquet file, whole or not at all."""
    import pyarrow.parquet as parquet

    buffer = io.BytesIO()
    parquet.write_table(_table(rows), buffer, compression="zstd")
    atomic_write(path, buffer.getvalue())


def read_part(path: Path) -> Iterator[Realigned]:
    import pyarrow.parquet as parquet

    for row in parquet.read_table(path).to_pylist():
        yield Realigned(**{**row, **{name: json.loads(row[name]) for name in JSON_COLUMNS}})


def join_parts(path: Path, parts: Sequence[Path]) -> None:
    """All parts in one Parquet file, a row group each."""
    import pyarrow.parquet as parquet

    with written_aside(path) as aside, parquet.ParquetWriter(aside, _schema(), compression="zstd") as writer:
        for part in parts:
            writer.write_table(parquet.read_table(part, schema=_schema()))


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """A JSONL file, whole or not at all."""
    with written_aside(path) as aside, aside.open("w", encoding="utf-8") as file:
        file.writelines(to_json(row) + "\n" for row in rows)
