"""What a file, a data set or a model is told apart by, without reading all of it."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

from statewise.settings import ModelSettings
from statewise.sources.data import DataSource
from statewise.sources.reading import find_data, find_files, is_saved

SLICES, SLICE_BYTES = 64, 1 << 16  # a file up to 4 MiB is read whole
MODEL_FILES = (".safetensors", ".bin", ".gguf", ".json", ".jinja")


def of_file(path: Path) -> str:
    """Hash of the size and of slices spread evenly over the file."""
    size = path.stat().st_size
    digest = blake2b(str(size).encode(), digest_size=16)
    whole = size <= SLICES * SLICE_BYTES
    with path.open("rb") as file:
        for index in range(1 if whole else SLICES):
            file.seek(0 if whole else index * (size - SLICE_BYTES) // (SLICES - 1))
            digest.update(file.read() if whole else file.read(SLICE_BYTES))
    return digest.hexdigest()


def of_data(source: DataSource, base_dir: Path) -> dict[str, str]:
    """{file: hash}, files by their name or their path inside the data's directory; empty for a hub id or an embedded task."""
    path = None if source.data.startswith("tiny:") else find_data(source.data, base_dir)
    if path is None:
        return {}
    if is_saved(path):
        files = sorted(f for f in path.rglob("*") if f.is_file() and f.suffix in (".arrow", ".json"))
    else:
        files = [path] if path.is_file() else find_files(path, source.split, source.config)
    return {f.name if path.is_file() else str(f.relative_to(path)): of_file(f) for f in files}


def of_model(settings: ModelSettings) -> dict[str, str]:
    """{file: hash} of a model directory; empty for a hub id."""
    from statewise.models.load import resolve

    path = Path(resolve(settings.path))
    if not path.is_dir():
        return {}
    return {f.name: of_file(f) for f in sorted(path.iterdir()) if f.is_file() and f.suffix in MODEL_FILES}


def differences(before: Any, after: Any, name: str = "") -> list[str]:
    """Names of what differs in two nested dicts."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*before, *(k for k in after if k not in before)]
        return [d for k in keys for d in differences(before.get(k), after.get(k), f"{name}.{k}".strip("."))]
    return [] if before == after else [f"{name} ({before!r:.60} before, {after!r:.60} now)"]
