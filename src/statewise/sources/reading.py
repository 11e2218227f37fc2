"""Rows of data from files, directories, the hub and the embedded tasks, each with the place it came from."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from statewise.errors import DataError

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
NOT_DATA = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json", "config.json")
# Words by which a file name says which split it holds.
SPLIT_WORDS = {
    **{name: name for name in ("train", "test", "validation")},
    **{name: "validation" for name in ("valid", "val", "dev", "eval")},
}
TINY_ROWS = 1000  # of an embedded task without a `count`
SHOWN_PLACES = 3
SHOWN_CHARACTERS = 120


class RowError(DataError):
    """What is wrong with a row. `reason` names the field and is the same for all rows of its kind; `detail` is the row's."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass
class Rows:
    """Rows with their places ("file:line"), and what was left out, by reason."""

    rows: list[Row] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    bad: dict[str, list[str]] = field(default_factory=dict)

    def add(self, place: str, row: Row) -> None:
        self.rows.append(row)
        self.places.append(place)

    def reject(self, place: str, error: DataError, on_bad_row: str) -> None:
        """Raise with the place, or note it, as `on_bad_row` says."""
        if on_bad_row == "error":
            raise DataError(
                f"{place}: {error}. Mend the row, or set on_bad_row = 'skip' to leave such rows out, counted."
            ) from None
        reason = getattr(error, "reason", str(error)[:SHOWN_CHARACTERS])
        self.bad.setdefault(reason, []).append(place)

    @property
    def num_bad(self) -> int:
        return sum(map(len, self.bad.values()))

    def counts(self) -> dict[str, Any]:
        """{reason: {"rows": number, "first": places}} of the rows left out."""
        return {reason: {"rows": len(p), "first": p[:SHOWN_PLACES]} for reason, p in self.bad.items()}


def shown(value: Any) -> str:
    """A value as messages show it."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


def find_data(data: str, base_dir: Path) -> Path | None:
    """The file or directory that `data` names, beside the recipe or in the working directory; None for a hub id."""
    given = Path(data).expanduser()
    for path in (base_dir / given, given):
        if path.exists():
            return path
    if given.suffix in SUFFIXES or data.startswith((".", "/", "~")):
        raise DataError(f"data: no file or directory '{data}', neither in {base_dir.resolve()} nor in {Path.cwd()}.")
    return None


def find_files(path: Path, split: str, config: str | None) -> list[Path]:
    """The data files of a directory (of its subdirectory `config`, where there is one), in the order of their names.

    Where file names say which split they hold (train, test, validation), only those of `split`.
    """
    root = path / config if config is not None and (path / config).is_dir() else path
    files = sorted(f for f in root.rglob("*") if f.suffix in SUFFIXES and f.is_file() and f.name not in NOT_DATA)
    files = [f for f in files if not any(part.startswith(".") for part in f.relative_to(root).parts)]
    if not files:
        raise DataError(
            f"{root}: holds no data file; expected {', '.join(SUFFIXES)} or what Dataset.save_to_disk writes."
        )
    named = {f: SPLIT_WORDS[w] for f in files for w in re.split(r"[^a-z]+", f.stem.lower()) if w in SPLIT_WORDS}
    if not named:
        return files
    chosen = [f for f in files if named.get(f) == SPLIT_WORDS.get(split, split)]
    if not chosen:
        raise DataError(f"{root}: has no file of split '{split}'; it has: {', '.join(f.name for f in files)}.")
    return chosen


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
    path = None if data.startswith("tiny:") else find_data(data, base_dir)
    if data.startswith("tiny:"):
        _read_tiny(data, split, tiny or {}, rows)
    elif path is None:
        _read_hub(data, config, split, rows)
    elif is_saved(path):
        _read_saved(path, split, rows)
    else:
        for file in [path] if path.is_file() else find_files(path, split, config):
            _read_file(file, on_bad_row, rows)
    if not rows.rows:
        raise DataError(f"{data}: holds no usable rows" + (f" (left out: {rows.counts()})." if rows.bad else "."))
    return rows


def is_saved(path: Path) -> bool:
    """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote this directory."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _read_tiny(name: str, split: str, settings: dict[str, Any], rows: Rows) -> None:
    from statewise.tiny import knowledge, tasks

    settings = {k: v for k, v in settings.items() if v is not None}
    count = settings.pop("count", None)
    arithmetic: dict[str, Callable[..., list[Row]]] = {
        "tiny:math": tasks.math_problems,
        "tiny:math_pairs": tasks.math_pairs,
        "tiny:math_restyled": tasks.math_restyled,
        "tiny:math_hinted": tasks.math_hinted,
    }
    if name in arithmetic:
        made = arithmetic[name](split, count or TINY_ROWS, **settings)
    elif count is None and name in ("tiny:facts", "tiny:beliefs"):
        every = len(list(knowledge.questions(name.removeprefix("tiny:"), split)))
        made = tasks.rows(name, split, min(every, TINY_ROWS), settings.get("seed", 0))
    else:
        made = tasks.rows(name, split, count or TINY_ROWS, settings.get("seed", 0))
    for row in made:
        rows.add(f"{name}:{row['id']}", row)


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


def _read_saved(path: Path, split: str, rows: Rows) -> None:
    from datasets import DatasetDict, load_from_disk

    loaded = load_from_disk(str(path))
    if isinstance(loaded, DatasetDict):
        if split not in loaded:
            raise DataError(f"{path}: has no split '{split}'; it has: {', '.join(map(str, loaded))}.")
        loaded = loaded[split]
    for index, row in enumerate(loaded):
        rows.add(f"{path}:{index}", dict(row))


def _read_file(path: Path, on_bad_row: str, rows: Rows) -> None:
    readers: dict[str, Callable[[Path], Iterator[tuple[str, Row | RowError]]]] = {
        ".jsonl": _json_lines,
        ".ndjson": _json_lines,
        ".json": _json,
        ".parquet": _parquet,
        ".csv": _csv,
    }
    if path.suffix not in readers:
        raise DataError(f"{path}: unknown kind of file '{path.suffix}'; expected one of {', '.join(SUFFIXES)}.")
    for place, row in readers[path.suffix](path):
        if isinstance(row, RowError):
            rows.reject(place, row, on_bad_row)
        else:
            rows.add(place, row)


def _json_lines(path: Path) -> Iterator[tuple[str, Row | RowError]]:
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
    return row if isinstance(row, dict) else _no_object(row)


def _no_object(value: Any) -> RowError:
    return RowError("is no object with named fields", f"received {shown(value)}")


def _json(path: Path) -> Iterator[tuple[str, Row | RowError]]:
    """A list of objects, an object whose `data` is one, or one object a line."""
    try:
        content = json.loads(_text(path))
    except ValueError as error:
        if str(error).startswith("Extra data"):
            yield from _json_lines(path)
            return
        raise DataError(f"{path}: is not JSON: {error}.") from None
    content = content.get("data", content) if isinstance(content, dict) else content
    if not isinstance(content, list):
        raise DataError(f"{path}: expected a list of objects, an object whose 'data' is one, or one object a line.")
    for index, row in enumerate(content):
        yield f"{path}[{index}]", row if isinstance(row, dict) else _no_object(row)


def _text(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(f"{path}:{line}: is not UTF-8 ({error.reason}); save the file as UTF-8.") from None


def _parquet(path: Path) -> Iterator[tuple[str, Row | RowError]]:
    import pyarrow.parquet as parquet
    from pyarrow import ArrowException

    try:
        table = parquet.read_table(path)
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: is no readable Parquet file: {error}") from None
    for number, row in enumerate(table.to_pylist(), 1):
        yield f"{path}:{number}", row


def _csv(path: Path) -> Iterator[tuple[str, Row | RowError]]:
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)
    names = reader.fieldnames or []
    if len(set(names)) < len(names):
        raise DataError(f"{path}:1: two columns have one name; the header is: {', '.join(names)}.")
    line = reader.line_num + 1
    try:
        for row in reader:
            extra = len(row.pop(None, []))  # where DictReader puts what has no name
            count = sum(value is not None for value in row.values()) + extra
            wrong = RowError("has another number of fields than the header", f"{count} for {len(names)}")
            yield f"{path}:{line}", wrong if count != len(names) else row
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: is not CSV: {error}.") from None
