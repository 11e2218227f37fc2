"""Decompositions of start weights, kept on disk under a hash of their content.

All checkpoints of a run, and all runs from a base, share W0. With its decomposition known, a new checkpoint costs half
when computed exactly, and a few products when its update is small enough for first order.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from statewise.files import written_aside
from statewise.geometry.checkpoints import Weights
from statewise.geometry.spectrum import RELIABLE, Decomposition, eigen, gram_of, orthonormal, other_side
from statewise.geometry.tensors import Tensor, read_header

if TYPE_CHECKING:
    import torch

VERSION = 1


@dataclass(frozen=True)
class Known:
    """A decomposition on disk; vectors are read when they are asked for."""

    tensors: dict[str, Tensor]

    @cached_property
    def s(self) -> np.ndarray:
        """All singular values, float64."""
        return self.tensors["s"].read().numpy()

    @cached_property
    def u(self) -> torch.Tensor:
        """All reliable left vectors [m, r], float32."""
        return self.tensors["u"].read()

    @cached_property
    def v(self) -> torch.Tensor:
        return self.tensors["v"].read()

    @property
    def k(self) -> int:
        return self.tensors["u_leading"].shape[1]

    def decomposition(self, k: int) -> Decomposition:
        """The k leading vectors in float64."""
        u, v = (self.tensors[f"{side}_leading"].read().numpy()[:, :k] for side in "uv")
        return Decomposition(self.s, u, v)


class Cache:
    """A directory of decompositions: KK/KEY.safetensors."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)

    def get(self, weights: Weights, k: int, device: str = "cpu") -> Known:
        """The decomposition of these values with k leading vectors in float64: read, or computed and written."""
        key = content_key(weights, k)
        file = self.directory / key[:2] / f"{key}.safetensors"
        if not file.is_file():
            self._write(file, weights, k, device)
        return Known(read_header(file))

    def _write(self, file: Path, weights: Weights, k: int, device: str) -> None:
        import torch
        from safetensors.torch import save_file

        file.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in full(weights, k, device).items()}
        with written_aside(file) as aside:
            save_file(tensors, aside)


def full(weights: Weights, k: int, device: str = "cpu") -> dict[str, np.ndarray]:
    """s, all vectors u, v in float32, and the k leading ones in float64."""
    shape = weights.stored.shape
    tall = shape[0] > shape[1]
    values, short = eigen(gram_of(weights, tall, device), min(shape))
    s = np.sqrt(np.maximum(values, 0))
    short = short[:, : int(np.count_nonzero(s > RELIABLE * s[0]))] if s[0] > 0 else short[:, :0]
    k = min(k, short.shape[1])
    lead = orthonormal(np.ascontiguousarray(short[:, :k]))
    lead_long = orthonormal(other_side(weights, lead / s[:k], tall, device))
    single = short.astype(np.float32)
    short /= s[: short.shape[1]]  # in place: the largest array there is
    long = other_side(weights, short, tall, device, np.float32)
    if tall:
        return {"s": s, "u": long, "u_leading": lead_long, "v": single, "v_leading": lead}
    return {"s": s, "u": single, "u_leading": lead, "v": long, "v_leading": lead_long}


def content_key(weights: Weights, k: int) -> str:
    """SHA-256 of the values, their type and shape, and what of the decomposition is kept."""
    import torch

    stored = weights.stored if weights.delta is None else weights.rows()
    head = f"{VERSION} {stored.dtype} {tuple(stored.shape)} {k}"
    digest = hashlib.sha256(head.encode())
    digest.update(stored.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def bytes_needed(shape: tuple[int, int], k: int) -> int:
    """Bytes that a matrix takes on disk."""
    p = min(shape)
    return (shape[0] + shape[1]) * (4 * p + 8 * min(k, p)) + 8 * p
