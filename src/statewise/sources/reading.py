"""Rows of data from files, directories, the hub and the embedded tasks, each with the place it came from."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from statewise.errors import DataError

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
SHOWN_PLACES = 3


@dataclass
class Rows:
    """Rows with their places ("file:line"), and what was left out, by reason."""

    rows: list[Row] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    bad: dict[str, list[str]] = field(default_factory=dict)

    def add(self, place: str, row: Row) -> None:
        self.rows.append(row)
        self.places.append(place)

    def reject(self, place: str, reason: str, on_bad_row: str) -> None:
        """Raise, or note it, as `on_bad_row` says."""
        if on_bad_row == "error":
            raise DataError(
                f"{place}: {reason}. Mend the row, or set on_bad_row = 'skip' to leave such rows out, counted."
            )
        self.bad.setdefault(reason, []).append(place)

    def counts(self) -> dict[str, Any]:
        """{reason: {"rows": number, "first": places}} of the rows left out."""
        return {reason: {"rows": len(p), "first": p[:SHOWN_PLACES]} for reason, p in self.bad.items()}


def find_data(data: str, base_dir: Path) -> Path | None:
    """The file or directory that `data` names, beside the recipe or in the working directory; None for a hub id."""
    for path in (base_dir / data, Path(data)):
        if path.exists():
            return path
    if Path(data).suffix in SUFFIXES or data.startswith((".", "/", "~")):
        raise DataError(f"data: no file or directory '{data}', neither in {base_dir.resolve()} nor in {Path.cwd()}.")
    return None


def read_rows(
    data: str,
    *,
    split: str = "train",
    config: str | None = None,
    base_dir: Path = Path("."),
    on_bad_row: str = "error",
    tiny: dict[str, Any] | None = None,
) -> Rows:
    """All rows of a .jsonl, .json, .parquet or .csv file, a directory of such files or of `Dataset.save_to_disk`, a hub
    id, or an embedded task "tiny:math" (`tiny`: count, seed, steps, style).

    Raises DataError that names file, line and reason.
    """
    rows = Rows()
    if data.startswith("tiny:"):
        return _read_tiny(data, split, tiny or {}, rows)
    path = find_data(data, base_dir)
    if path is None:
        _read_hub(data, config, split, rows)
    elif path.is_dir():
        _read_directory(path, split, on_bad_row, rows)
    else:
        _read_file(path, on_bad_row, rows)
    if not rows.rows:
        raise DataError(f"{data}: holds no usable rows" + (f" (left out: {rows.counts()})." if rows.bad else "."))
    return rows


def _read_tiny(name: str, split: str, settings: dict[str, Any], rows: Rows) -> Rows:
    from statewise.tiny import tasks

    settings = {k: v for k, v in settings.items() if v is not None}
    count = settings.pop("count", 1000)
    arithmetic = {"tiny:math": tasks.math_problems, "tiny:math_pairs": tasks.math_pairs}
    made = (
        arithmetic[name](split, count, **settings)
        if name in arithmetic
        else tasks.rows(name, split, count, settings.get("seed", 0))
    )
    for row in made:
        rows.add(f"{name}:{row['id']}", row)
    return rows


def _read_hub(name: str, config: str | None, split: str, rows: Rows) -> None:
    from datasets import load_dataset

    try:
        loaded = load_dataset(name, config, split=split)
    except Exception as error:  # the library raises a dozen kinds for a name, a network or a split that is not there
        raise DataError(
            f"data: '{name}' is no local file, and the hub gave no data set of this name (config {config!r}, split "
            f"'{split}'): {type(error).__name__}: {error}"
        ) from error
    for index, row in enumerate(loaded):
        rows.add(f"{name}[{split}]:{index}", dict(row))


def _read_directory(path: Path, split: str, on_bad_row: str, rows: Rows) -> None:
    if (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
        from datasets import DatasetDict, load_from_disk

        loaded = load_from_disk(str(path))
        if isinstance(loaded, DatasetDict):
            if split not in loaded:
                raise DataError(f"{path}: has no split '{split}'; it has: {', '.join(map(str, loaded))}.")
            loaded = loaded[split]
        for index, row in enumerate(loaded):
            rows.add(f"{path}:{index}", dict(row))
        return
    files = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file())
    if not files:
        raise DataError(
            f"{path}: holds no data file; expected {', '.join(SUFFIXES)} or what Dataset.save_to_disk writes."
        )
    for file in [f for f in files if split in f.stem.split("-") or f.stem.startswith(split)] or files:
        _read_file(file, on_bad_row, rows)


def _read_file(path: Path, on_bad_row: str, rows: Rows) -> None:
    readers: dict[str, Callable[[Path], Iterator[tuple[str, Row | str]]]] = {
        ".jsonl": _json_lines,
        ".ndjson": _json_lines,
        ".json": _json_list,
        ".parquet": _parquet,
        ".csv": _csv,
    }
    if path.suffix not in readers:
        raise DataError(f"{path}: unknown kind of file '{path.suffix}'; expected one of {', '.join(SUFFIXES)}.")
    try:
        for place, row in readers[path.suffix](path):
            if isinstance(row, str):
                rows.reject(place, row, on_bad_row)
            else:
                rows.add(place, row)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 (byte {error.start}: {error.reason}); save it as UTF-8.") from None


def _json_lines(path: Path) -> Iterator[tuple[str, Row | str]]:
    """A row, or the reason why there is none, a line."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", _json_row(line)


def _json_row(line: str) -> Row | str:
    try:
        row = json.loads(line)
    except ValueError as error:
        return f"is not JSON: {error}"
    return row if isinstance(row, dict) else f"received a JSON {type(row).__name__}, expected an object"


def _json_list(path: Path) -> Iterator[tuple[str, Row | str]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise DataError(
            f"{path}: is not JSON: {error}; a file with one object a line should be named .jsonl."
        ) from None
    if isinstance(content, dict):
        content = content.get("data")
    if not isinstance(content, list):
        raise DataError(f"{path}: expected a list of objects, or an object whose 'data' is one.")
    for number, row in enumerate(content, 1):
        yield f"{path}:{number}", row if isinstance(row, dict) else f"received {type(row).__name__}, expected an object"


def _parquet(path: Path) -> Iterator[tuple[str, Row | str]]:
    import pyarrow.parquet as parquet
    from pyarrow import ArrowException

    try:
        table = parquet.read_table(path)
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: is no readable Parquet file: {error}") from None
    for number, row in enumerate(table.to_pylist(), 1):
        yield f"{path}:{number}", row


def _csv(path: Path) -> Iterator[tuple[str, Row | str]]:
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                wrong = None in row or None in row.values()
                expected = len(reader.fieldnames or ())
                yield f"{path}:{reader.line_num}", f"has not {expected} fields, as the header does" if wrong else row
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: is not CSV: {error}") from None
