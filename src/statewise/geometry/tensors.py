"""Tensors of safetensors files, read by rows with plain reads: nothing is mapped, so memory is what is asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from statewise.errors import CheckpointError

if TYPE_CHECKING:
    import torch

# What a number can be read from; quantised types are refused, since their scales live elsewhere.
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MAX_HEADER_BYTES = 100_000_000  # the format's own bound


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies; `dtype` is the file's word for it (BF16, F32 ...), `start` a byte of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    start: int

    @property
    def entries(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def read(self, low: int = 0, high: int | None = None) -> torch.Tensor:
        """Rows low to high of the first axis, in the stored type. Raises CheckpointError."""
        import torch

        if self.dtype not in FLOATS:
            raise CheckpointError(
                f"{self.file}: tensor '{self.name}' is {self.dtype}, expected one of {', '.join(FLOATS)}. Quantised "
                "weights must be dequantised first, or left out with --exclude."
            )
        dtype = getattr(torch, FLOATS[self.dtype])
        rows = (self.shape[0] if self.shape else 1) if high is None else high
        width = int(np.prod(self.shape[1:], dtype=np.int64))
        raw = np.empty((rows - low) * width * dtype.itemsize, dtype=np.uint8)
        with self.file.open("rb") as file:
            file.seek(self.start + low * width * dtype.itemsize)
            if file.readinto(raw.data) != raw.size:
                raise CheckpointError(f"{self.file}: ends inside tensor '{self.name}': the file is cut short.")
        return torch.from_numpy(raw).view(dtype).reshape(rows - low, *self.shape[1:])


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file: 8 bytes of length, a JSON header, data. Raises CheckpointError."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        return {
            name: Tensor(name, tuple(e["shape"]), e["dtype"], file, 8 + length + e["data_offsets"][0])
            for name, e in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: is not a safetensors file: {error}") from None


def read_directory(directory: Path, stem: str = "model") -> dict[str, Tensor]:
    """All tensors of a directory: `stem`.safetensors.index.json with its shards, else `stem`.safetensors, else every file.

    Raises CheckpointError where there is none, or where the index names a shard or a tensor that is not there.
    """
    index = directory / f"{stem}.safetensors.index.json"
    if not index.is_file():
        single = directory / f"{stem}.safetensors"
        files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
        if not files:
            raise CheckpointError(
                f"{directory}: holds no *.safetensors, expected a Hugging Face checkpoint, a PEFT adapter or a run."
            )
        return {name: tensor for file in files for name, tensor in read_header(file).items()}
    try:
        where = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: can't be read: {error}") from None
    shards = {name: read_header(directory / name) for name in sorted(set(where.values()))}
    lost = sorted(name for name, shard in where.items() if name not in shards[shard])
    if lost:
        raise CheckpointError(f"{index}: names {len(lost)} tensors that its shards don't hold, such as '{lost[0]}'.")
    return {name: shards[shard][name] for name, shard in where.items()}
