"""Rows of one file, one after the other, each with its place ("file:line"), or with what is wrong with it."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from statewise.errors import DataError

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
BATCH_ROWS = 256  # of a Parquet file, held at a time
SHOWN_CHARACTERS = 120


class RowError(DataError):
    """What is wrong with a row. `reason` names the field and is the same for all rows of its kind; `detail` is the row's."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, self.detail)  # so that a process gets it whole from another


Placed = tuple[str, Row | RowError]


def shown(value: Any) -> str:
    """A value as messages show it."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


def file_rows(path: Path) -> Iterator[Placed]:
    readers: dict[str, Callable[[Path], Iterator[Placed]]] = {
        ".jsonl": _json_lines,
        ".ndjson": _json_lines,
        ".json": _json,
        ".parquet": _parquet,
        ".csv": _csv,
    }
    if path.suffix not in readers:
        raise DataError(f"{path}: unknown kind of file '{path.suffix}'; expected one of {', '.join(SUFFIXES)}.")
    return readers[path.suffix](path)


def _json_lines(path: Path) -> Iterator[Placed]:
    """A row, or what is wrong with it, a line; empty lines are no rows."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):  # cut at \n alone: strings may hold other line separators
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield f"{path}:{number}", _json_row(line)


def _json_row(line: bytes) -> Row | RowError:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return RowError("is not UTF-8", f"byte {error.start + 1} of the line, {error.reason}; save the file as UTF-8")
    except ValueError as error:
        return RowError("is not JSON", str(error))
    return _whole(row) if b"\\ud" in line.lower() else _object(row)


def _whole(value: Any) -> Row | RowError:
    """JSON can escape half a character, such as \\ud83d alone, that no tokenizer reads and no file holds."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return RowError("holds half a character", f"\\u{ord(error.object[error.start]):x} without its other half")
    return _object(value)


def _object(value: Any) -> Row | RowError:
    return value if isinstance(value, dict) else _no_object(value)


def _no_object(value: Any) -> RowError:
    return RowError("is no object with named fields", f"received {shown(value)}")


def _json(path: Path) -> Iterator[Placed]:
    """A list of objects, an object whose `data` is one, or one object a line."""
    try:
        text = _text(path)
        content = json.loads(text)
    except ValueError as error:
        if str(error).startswith("Extra data"):
            yield from _json_lines(path)
            return
        raise DataError(f"{path}: is not JSON: {error}.") from None
    content = content.get("data", content) if isinstance(content, dict) else content
    if not isinstance(content, list):
        raise DataError(f"{path}: expected a list of objects, an object whose 'data' is one, or one object a line.")
    check = _whole if "\\ud" in text.lower() else _object
    for index, row in enumerate(content):
        yield f"{path}[{index}]", check(row)


def _text(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(f"{path}:{line}: is not UTF-8 ({error.reason}); save the file as UTF-8.") from None


def _parquet(path: Path) -> Iterator[Placed]:
    import pyarrow.parquet as parquet
    from pyarrow import ArrowException

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: is no readable Parquet file: {error}") from None


def _csv(path: Path) -> Iterator[Placed]:
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            yield from _csv_rows(path, reader)
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: is not CSV: {error}.") from None
        except UnicodeDecodeError:
            _text(path)  # raises, and names the line


def _csv_rows(path: Path, reader: csv.DictReader[str]) -> Iterator[Placed]:
    names = reader.fieldnames or []
    if len(set(names)) < len(names):
        raise DataError(f"{path}:1: two columns have one name; the header is: {', '.join(names)}.")
    line = reader.line_num + 1
    for row in reader:
        extra = len(row.pop(None, []))  # where DictReader puts what has no name
        count = sum(value is not None for value in row.values()) + extra
        wrong = RowError("has another number of fields than the header", f"{count} for {len(names)}")
        yield f"{path}:{line}", wrong if count != len(names) else row
        line = reader.line_num + 1
