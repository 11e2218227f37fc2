"""Writing files so that a reader never sees half of one, and JSON that any parser reads."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any

DIGITS = "[0-9a-f]" * 12  # of a temporary name, as a pattern


def atomic_write(path: Path, content: bytes | str) -> None:
    """Replace `path` by `content` (text as UTF-8): after a crash it holds the old bytes or the new ones."""
    with written_aside(path) as aside:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of writing name `path`, where they name a temporary file or, as on a full disk, none. Raises OSError."""
    try:
        yield
    except Exception as error:
        named = getattr(error, "filename", None)
        number = error.errno if isinstance(error, OSError) else _number_told(error)
        if number is None or not (named is None or str(named).endswith(".tmp")):
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def _number_told(error: Exception) -> int | None:
    """The system's error number in the text of what is raised by safetensors and tokenizers, which are written in Rust."""
    told = re.search(r"\(os error (\d+)\)", str(error))
    return int(told[1]) if told else None


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A temporary name to write a file under; it takes the name `path` when the block ends without an error.

    What killed writers of `path` left under such names goes; what another one is writing is locked, and stays.
    """
    aside = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
    with naming(path), _locked(aside):
        try:
            yield aside
            open_to_others(aside)
            sync(aside)
            os.replace(aside, path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
    _clear(path)
    sync(path.parent)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """A new file, locked where the file system can: the system frees it when the process ends, however it ends."""
    descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _clear(path: Path) -> None:
    for left in path.parent.glob(f".{escape(path.name)}.{DIGITS}.tmp"):
        with suppress(OSError), left.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def open_to_others(path: Path) -> None:
    """Give a file, or all in a directory, the permissions of any new file; safetensors makes its own for the owner alone."""
    for file in path.rglob("*") if path.is_dir() else (path,):
        if file.is_file():
            file.chmod(0o666 & ~_umask())


def _umask() -> int:
    before = os.umask(0o077)  # can only be read by setting it
    os.umask(before)
    return before


def is_unused(directory: Path) -> bool:
    """Whether it is not there, or holds no file but what killed writers left under temporary names."""
    files = (path for path in directory.rglob("*") if not path.is_dir())
    return not directory.exists() or (directory.is_dir() and all(path.match(f".*.{DIGITS}.tmp") for path in files))


def sync(path: Path) -> None:
    """Have the system put a file, or a directory's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinities become null, numbers of numpy and torch plain numbers, paths text.

    Half a surrogate pair, which UTF-8 has no bytes for, is written as JSON's escape of it.
    """
    text = json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def plain(value: Any) -> Any:
    """`value` as nested dicts and lists of what JSON can hold."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def json_row(line: str) -> dict[str, Any] | None:
    """The row of a line of JSONL: empty for an empty line, None where it is none, as a part of one that a crash left."""
    if not line:
        return {}
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
