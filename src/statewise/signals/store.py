"""Teachers' log-probabilities in a folder, by content: what was asked once is read from then on, by any run.

<folder>/<teacher>/teacher.json       what the teacher is
<folder>/<teacher>/<name>.safetensors a batch of sequences: <key>.logprobs [T], <key>.ids and <key>.values [T, K]

A key is the hash of token ids and settings. Files appear under their names when they are whole and never change, so runs
may share a folder.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from statewise.errors import DataError
from statewise.files import atomic_write, to_json

if TYPE_CHECKING:
    from statewise.models.topk import TopK

PARTS = ("logprobs", "ids", "values")
# Nats, mean over a probe text that is asked alone, so that little but other weights can change it.
OTHER_WEIGHTS = 0.002


class SignalStore:
    """The part of `folder` that belongs to one teacher.

    about: what the teacher is (plain values); marks: log-probabilities of a fixed text, where its weights can't be seen.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], marks: Sequence[float] = ()):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder / _name(folder, dict(about), list(marks))
            self.path.mkdir(exist_ok=True)
            description = self.path / "teacher.json"
            if not description.exists():
                atomic_write(description, to_json({"about": about, "marks": list(marks)}, indent=2) + "\n")
        except OSError as error:
            raise DataError(f"signal.cache = '{folder}': can't be used as a folder: {error.strerror}.") from None
        self._where: dict[str, Path] = {}
        self._seen: set[str] = set()

    def topk(
        self, sequences: Sequence[Sequence[int]], settings: str, ask: Callable[[list[Sequence[int]]], list[TopK]]
    ) -> tuple[list[TopK], list[bool]]:
        """What is stored, and what `ask` gives for the rest, which is stored; and which were found."""
        keys = [_key(ids, settings) for ids in sequences]
        found = self._read(keys)
        hits = [key in found for key in keys]
        missing = {key: ids for key, ids in zip(keys, sequences, strict=True) if key not in found}
        if missing:
            fresh = dict(zip(missing, ask(list(missing.values())), strict=True))
            self._write(fresh)
            found |= fresh
        return [found[key] for key in keys], hits

    def _read(self, keys: Sequence[str]) -> dict[str, TopK]:
        from statewise.models.topk import TopK

        self._look()
        by_file: dict[Path, set[str]] = {}
        for key in keys:
            if key in self._where:
                by_file.setdefault(self._where[key], set()).add(key)
        found: dict[str, TopK] = {}
        for path, wanted in by_file.items():
            try:
                with _opened(path) as file:
                    found |= {k: TopK(*(file.get_tensor(f"{k}.{part}") for part in PARTS)) for k in sorted(wanted)}
            except Exception as error:
                self._damaged(path, error)
        return found

    def _look(self) -> None:
        """Learn of files that appeared since."""
        for path in sorted(self.path.glob("*.safetensors")):
            if path.name in self._seen:
                continue
            self._seen.add(path.name)
            try:
                with _opened(path) as file:
                    names = list(file.keys())
            except Exception as error:
                self._damaged(path, error)
                continue
            self._where |= {name.partition(".")[0]: path for name in names}

    def _write(self, fresh: Mapping[str, TopK]) -> None:
        from safetensors.numpy import save

        tensors = {f"{k}.{part}": np.ascontiguousarray(getattr(v, part)) for k, v in fresh.items() for part in PARTS}
        name = sha256("".join(sorted(fresh)).encode()).hexdigest()[:24]
        atomic_write(self.path / f"{name}.safetensors", save(tensors))

    def _damaged(self, path: Path, error: Exception) -> None:
        self._where = {key: where for key, where in self._where.items() if where != path}
        warnings.warn(f"{path}: can't be read ({error}); what it held is asked for again.", stacklevel=3)


def _opened(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="numpy")


def _key(ids: Sequence[int], settings: str) -> str:
    return sha256(settings.encode() + b"\0" + np.asarray(ids, np.int64).tobytes()).hexdigest()[:32]


def _name(folder: Path, about: dict[str, Any], marks: list[float]) -> str:
    """The directory of a teacher that is the same up to rounding, or a new one."""
    about = json.loads(to_json(about))
    for file in sorted(folder.glob("*/teacher.json")):
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
            same = known["about"] == about and len(known["marks"]) == len(marks)
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if same and sum(abs(a - b) for a, b in zip(known["marks"], marks, strict=True)) <= OTHER_WEIGHTS * len(marks):
            return file.parent.name
    return sha256(to_json([about, marks]).encode()).hexdigest()[:16]


def weights_hash(model: Any) -> str:
    """SHA-256 of a model's tensors with their names and dtypes, and of what its config says about computing."""
    import torch

    config = getattr(model, "config", None)
    shown = config.to_diff_dict() if config is not None else {}
    plain = {k: v for k, v in shown.items() if k not in ("_name_or_path", "transformers_version", "dtype")}
    digest = sha256(json.dumps(plain, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
