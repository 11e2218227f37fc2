"""Rows of measurements as Parquet and back."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from statewise.geometry.aggregate import Row


def parquet(rows: Sequence[Row]) -> bytes:
    """A table of the rows; a column for every name that one of them has."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = dict.fromkeys(name for row in rows for name in row)
    buffer = BytesIO()
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), buffer)
    return buffer.getvalue()


def read_parquet(file: Path) -> list[Row]:
    import pyarrow.parquet as pq

    return list(pq.read_table(file).to_pylist())
