"""Rows of data from files, directories, the hub and the embedded tasks, each with the place it came from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from statewise.errors import DataError
from statewise.hub import prepare_hub
from statewise.sources.files import SHOWN_CHARACTERS, SUFFIXES, Placed, Row, RowError, file_rows, shown

NOT_DATA = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json", "config.json")
# Words by which a file name says which split it holds.
SPLIT_WORDS = {
    **{name: name for name in ("train", "test", "validation")},
    **{name: "validation" for name in ("valid", "val", "dev", "eval")},
}
__all__ = [
    "Placed",
    "Row",
    "RowError",
    "Rows",
    "find_data",
    "find_files",
    "is_saved",
    "read_rows",
    "shown",
    "stream_rows",
]
TINY_ROWS = 1000  # of an embedded task without a `count`
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


def find_data(data: str, base_dir: Path) -> Path | None:
    """The file or directory that `data` names, beside the recipe or in the working directory; None for a hub id."""
    given = Path(data).expanduser()
    for path in (base_dir / given, given):
        if path.exists():
            return path
    if given.suffix in SUFFIXES or data.startswith((".", "/", "~")):
        looked = dict.fromkeys([str(base_dir.resolve()), str(Path.cwd())])
        raise DataError(f"data: no file or directory '{data}'; looked in {' and '.join(looked)}.")
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
    """All rows that `stream_rows` gives. Raises DataError that names file, line and reason."""
    rows = Rows()
    for place, row in stream_rows(data, split=split, config=config, base_dir=base_dir, tiny=tiny):
        if isinstance(row, RowError):
            rows.reject(place, row, on_bad_row)
        else:
            rows.add(place, row)
    if not rows.rows:
        raise DataError(f"{data}: holds no usable rows" + (f" (left out: {rows.counts()})." if rows.bad else "."))
    return rows


def stream_rows(
    data: str,
    *,
    split: str = "train",
    config: str | None = None,
    base_dir: Path = Path("."),
    tiny: dict[str, Any] | None = None,
) -> Iterator[Placed]:
    """(place, row or what is wrong with it) of a .jsonl, .json, .parquet or .csv file, a directory of such files or of
    `Dataset.save_to_disk`, a hub id, or an embedded task "tiny:math" (`tiny`: count, seed, steps, style).

    Little is held at a time, except of a .json file that is one list.
    """
    path = None if data.startswith("tiny:") else find_data(data, base_dir)
    if data.startswith("tiny:"):
        yield from _tiny(data, split, tiny or {})
    elif path is None:
        yield from _hub(data, config, split)
    elif is_saved(path):
        yield from _saved(path, split)
    else:
        for file in [path] if path.is_file() else find_files(path, split, config):
            yield from file_rows(file)


def is_saved(path: Path) -> bool:
    """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote this directory."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _tiny(name: str, split: str, settings: dict[str, Any]) -> Iterator[Placed]:
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
        yield f"{name}:{row['id']}", row


def _hub(name: str, config: str | None, split: str) -> Iterator[Placed]:
    prepare_hub(name)
    from datasets import load_dataset

    try:
        loaded = load_dataset(name, config, split=split)
    except Exception as error:  # the library raises a dozen kinds for a name, a network or a split that is not there
        raise DataError(
            f"data: '{name}' is no local file, and the hub gave no data set of this name (config {config!r}, split "
            f"'{split}'): {type(error).__name__}: {error}"
        ) from error
    for index, row in enumerate(loaded):
        yield f"{name}[{split}]:{index}", dict(row)


def _saved(path: Path, split: str) -> Iterator[Placed]:
    from datasets import DatasetDict, load_from_disk

    loaded = load_from_disk(str(path))
    if isinstance(loaded, DatasetDict):
        if split not in loaded:
            raise DataError(f"{path}: has no split '{split}'; it has: {', '.join(map(str, loaded))}.")
        loaded = loaded[split]
    for index, row in enumerate(loaded):
        yield f"{path}:{index}", dict(row)
