"""Base scores, measured once: kept by the content of model, task, data and code, in the user's cache directory.

`STATEWISE_CACHE` names another directory, or is "off".
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statewise.component import Task
from statewise.errors import DataError
from statewise.evals.results import TaskResult, from_plain
from statewise.evals.rows import RowsTask
from statewise.files import atomic_write, sha256, to_json

if TYPE_CHECKING:
    from statewise.settings import ModelSettings

MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt", ".gguf", ".bin")
NOT_MODEL = ("optimizer.safetensors", "components.safetensors", "trainer.json", "manifest.json", "build.json")
PACKAGE = Path(__file__).parents[1]


def cache_dir() -> Path | None:
    """Where scores are kept; None where `STATEWISE_CACHE` is "off"."""
    named = os.environ.get("STATEWISE_CACHE", "")
    if named.lower() in ("off", "0"):
        return None
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(named) if named else home / "statewise") / "evals"


@dataclass(frozen=True)
class ScoreCache:
    """Results of one model. `facts`: what decides its scores beside task and data."""

    directory: Path
    facts: Mapping[str, Any]

    def key(self, task: Task, *, seed: int, limit: int | None, base_dir: Path) -> str | None:
        """A content hash; None for a task that can't be told by its content (one of a plug-in, a hub id)."""
        if not isinstance(task, RowsTask) or not type(task).__module__.startswith("statewise.") or task.files():
            return None
        data = _data_digest(task, base_dir)
        if data is None:
            return None
        settings = {**task.model_dump(mode="json"), "kind": task.kind}
        told = {**self.facts, "task": settings, "data": data, "limit": limit, "seed": seed if task.is_random else None}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def find(self, key: str | None) -> TaskResult | None:
        """The result kept under a key; None where there is none, or no readable one."""
        if key is None:
            return None
        try:
            return from_plain(json.loads((self.directory / f"{key}.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def keep(self, key: str | None, result: TaskResult) -> None:
        """Keep a result; where the directory can't be written, nothing is kept."""
        if key is None:
            return
        plain = {**result.summary(), "records": [dict(record) for record in result.records]}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            atomic_write(self.directory / f"{key}.json", to_json(plain))
        except OSError:
            return


def open_cache(settings: ModelSettings, *, device: str, batch_tokens: int) -> ScoreCache | None:
    """The cache of the model that these settings load; None where caching is off or the model's files aren't known.

    An adapter that is not trained yet changes no score, so that it is left out.
    """
    directory, digest = cache_dir(), _model_digest(settings)
    if directory is None or digest is None:
        return None
    plain = settings.model_dump(mode="json", include={"dtype", "attention", "gguf_file"})
    template = Path(settings.chat_template).read_text(encoding="utf-8") if settings.chat_template else None
    made_by = {name: version(name) for name in ("torch", "transformers")} | {"code": _code_digest()}
    facts = {"model": digest, **plain, "chat_template": template, "device": device, "batch_tokens": batch_tokens}
    return ScoreCache(directory, {**facts, **made_by})


def _model_digest(settings: ModelSettings) -> str | None:
    from statewise.models.load import resolve

    paths = [Path(resolve(settings.path))]
    if settings.adapter is not None and settings.adapter.path is not None:
        paths.append(Path(settings.adapter.path))
    for path in list(paths):
        config = path / "adapter_config.json"
        if config.is_file():
            paths.append(Path(resolve(str(json.loads(config.read_text())["base_model_name_or_path"]))))
    if not all(path.is_dir() for path in paths):
        return None
    return _digest(f for p in paths for f in p.iterdir() if f.suffix in MODEL_SUFFIXES and f.name not in NOT_MODEL)


def _data_digest(task: RowsTask, base_dir: Path) -> str | None:
    """Of the files that a task reads; empty for tasks that are made by code."""
    from statewise.sources.reading import find_data, find_files, is_saved

    data = getattr(task, "data", None)
    if data is None:
        return ""
    try:
        path = find_data(data, base_dir)
    except DataError:
        return None
    if path is None:
        return None
    if path.is_file():
        return sha256(path)
    found = sorted(path.rglob("*")) if is_saved(path) else find_files(path, task.split, task.config)  # type: ignore[attr-defined]
    return _digest(f for f in found if f.is_file())


@cache
def _code_digest() -> str:
    """Of this package: another version may score otherwise."""
    return _digest(PACKAGE.rglob("*.py"))


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.name} {sha256(file)}\n".encode())
    return digest.hexdigest()
