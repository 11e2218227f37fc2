"""Which matrices a model has, how they are named, and whether several checkpoints have the same ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from statewise.errors import CheckpointError, RecipeError, nearest
from statewise.geometry.checkpoints import Checkpoint, Weights
from statewise.geometry.tensors import Tensor

MODULES = {
    "q": ("q_proj", "query"),
    "k": ("k_proj", "key"),
    "v": ("v_proj", "value"),
    "o": ("o_proj", "out_proj"),
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "w3"),
    "down": ("down_proj", "w2"),
    "embed": ("embed_tokens", "embed_in", "wte"),
    "lm_head": ("lm_head", "embed_out"),
}
GROUPS = {
    "attention": ("q", "k", "v", "o"),
    "mlp": ("gate", "up", "down"),
    "linear": ("q", "k", "v", "o", "gate", "up", "down", "other"),
    "all": ("q", "k", "v", "o", "gate", "up", "down", "other", "embed", "lm_head", "rest"),
}
TIED = "lm_head.weight"
SHOWN = 8


@dataclass(frozen=True)
class Matrix:
    """One matrix to measure: a tensor, or some rows of a fused one. `head`: (axis, size) of attention heads."""

    name: str
    tensor: str
    module: str
    layer: int | None
    shape: tuple[int, int]
    ranges: tuple[tuple[int, int], ...] = ()
    head: tuple[int, int] | None = None

    @property
    def entries(self) -> int:
        return self.shape[0] * self.shape[1]

    def of(self, checkpoint: Checkpoint) -> Weights:
        """Its values in a checkpoint."""
        import torch

        whole = checkpoint.read(self.tensor)
        if self.ranges:
            whole = whole.select(torch.cat([torch.arange(*r) for r in self.ranges]))
        return whole if whole.stored.ndim == 2 else Weights(whole.stored.reshape(self.shape))


@dataclass(frozen=True)
class Selection:
    """Which matrices: module names or groups, layers (all where none are given), and name patterns to leave out."""

    modules: tuple[str, ...] = ("linear",)
    layers: tuple[int, ...] | None = None
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known = {*GROUPS["all"], *GROUPS}
        for name in self.modules:
            if name not in known:
                raise RecipeError(f"--modules: received '{name}'{nearest(name, known)}")

    @property
    def wanted(self) -> set[str]:
        return {part for name in self.modules for part in GROUPS.get(name, (name,))}

    def takes(self, matrix: Matrix) -> bool:
        return (
            matrix.module in self.wanted
            and (self.layers is None or matrix.layer in self.layers)
            and not any(fnmatch(matrix.name, pattern) or pattern in matrix.name for pattern in self.exclude)
        )


@dataclass
class Matched:
    """The matrices that all checkpoints share, and what a reader must know about the rest."""

    matrices: list[Matrix] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def match(checkpoints: Sequence[Checkpoint], selection: Selection) -> Matched:
    """The selected matrices of all checkpoints. Raises CheckpointError that lists those whose name or shape differs."""
    first, found = checkpoints[0], Matched()
    for other in checkpoints[1:]:
        wrong, aside = _differences(first, other, selection, found.notes)
        if wrong:
            raise CheckpointError(
                f"{first.label} and {other.label} are not of one shape: {_listed(wrong)}. Compare checkpoints of one "
                "model, or leave these out with --exclude."
            )
        if aside:
            found.notes.append(f"differ, but are not among the chosen matrices: {_listed(aside)}")
    for tensor in first.tensors.values():
        if tensor.name != TIED or not _is_tied(first):
            found.matrices += [m for m in matrices_of(tensor, first.config, found.notes) if selection.takes(m)]
    found.notes = list(dict.fromkeys(found.notes))
    if not found.matrices:
        raise CheckpointError(
            f"{first.label}: no matrix is left by --modules {' '.join(selection.modules)} and the rest."
        )
    return found


def _differences(a: Checkpoint, b: Checkpoint, selection: Selection, notes: list[str]) -> tuple[list[str], list[str]]:
    """(among the chosen, among the others): a line for each tensor that only one has, or that has another shape."""
    wrong: list[str] = []
    aside: list[str] = []
    for name in sorted(a.tensors.keys() | b.tensors.keys()):
        left, right = a.tensors.get(name), b.tensors.get(name)
        if name == TIED and (_is_tied(a) or _is_tied(b)):
            notes.append("lm_head.weight is tied to the embedding: counted once, as embed")
            continue
        if left is not None and right is not None and left.shape == right.shape:
            continue
        shapes = [f"{t.shape}" if t is not None else "missing" for t in (left, right)]
        one = left if left is not None else right
        assert one is not None
        chosen = any(selection.takes(m) for m in matrices_of(one, a.config, []))
        (wrong if chosen else aside).append(f"{name} ({shapes[0]} and {shapes[1]})")
    return wrong, aside


def _is_tied(checkpoint: Checkpoint) -> bool:
    text = checkpoint.config.get("text_config") or checkpoint.config
    return bool(checkpoint.config.get("tie_word_embeddings", text.get("tie_word_embeddings")))


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest


def matrices_of(tensor: Tensor, config: dict[str, Any], notes: list[str]) -> list[Matrix]:
    """The matrices in a tensor: itself, or the parts of a fused one; a vector is a matrix of one row."""
    found = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", tensor.name)
    layer = int(found[1]) if found else None
    stem = tensor.name.removesuffix(".weight").rsplit(".", 1)[-1]
    if len(tensor.shape) > 2 or not tensor.shape:
        notes.append(f"{tensor.name} has {len(tensor.shape)} axes and is left out: expected a matrix or a vector")
        return []
    if len(tensor.shape) == 1:
        return [Matrix(tensor.name, tensor.name, "rest", layer, (1, tensor.shape[0]))]
    parts = _fused(stem, tensor.shape, config)
    if not parts:
        module = next((name for name, stems in MODULES.items() if stem in stems), "other" if found else "rest")
        shape = (tensor.shape[0], tensor.shape[1])
        return [Matrix(tensor.name, tensor.name, module, layer, shape, head=_head(module, shape, config))]
    notes.append(f"{stem} is split by the config into {', '.join(parts)}")
    matrices = []
    for module, ranges in parts.items():
        shape = (sum(high - low for low, high in ranges), tensor.shape[1])
        head = _head(module, shape, config)
        matrices.append(Matrix(f"{tensor.name}[{module}]", tensor.name, module, layer, shape, tuple(ranges), head))
    return matrices


def _fused(stem: str, shape: tuple[int, ...], config: dict[str, Any]) -> dict[str, list[tuple[int, int]]]:
    """Row ranges of the parts of a fused tensor; empty where it is none, or its size is not what the config says."""
    if stem == "gate_up_proj" and shape[0] % 2 == 0:
        half = shape[0] // 2
        return {"gate": [(0, half)], "up": [(half, shape[0])]}
    heads, groups, size = _heads(config)
    if stem not in ("qkv_proj", "query_key_value") or not size or shape[0] != (heads + 2 * groups) * size:
        return {}
    if config.get("model_type") == "gpt_neox":  # q, k and v of a head lie together
        starts = range(0, shape[0], 3 * size)
        return {m: [(s + i * size, s + (i + 1) * size) for s in starts] for i, m in enumerate("qkv")}
    ends = [0, heads * size, (heads + groups) * size, shape[0]]
    return {m: [(ends[i], ends[i + 1])] for i, m in enumerate("qkv")}


def _heads(config: dict[str, Any]) -> tuple[int, int, int]:
    """(query heads, key and value heads, head size); zeros where the config does not say."""
    text = config.get("text_config") or config
    heads = int(text.get("num_attention_heads") or 0)
    size = text.get("head_dim") or (int(text.get("hidden_size") or 0) // heads if heads else 0)
    return heads, int(text.get("num_key_value_heads") or heads), int(size)


def _head(module: str, shape: tuple[int, int], config: dict[str, Any]) -> tuple[int, int] | None:
    """Rows of q, k, v and columns of o belong to heads."""
    size = _heads(config)[2]
    axis = 0 if module in ("q", "k", "v") else 1
    return (axis, size) if module in ("q", "k", "v", "o") and size and shape[axis] % size == 0 else None


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """`0-3,7` as (0, 1, 2, 3, 7). Raises RecipeError."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if bounds is None:
            raise RecipeError(f"--layers: received '{part}', expected numbers and ranges such as 0-3,7.")
        found += range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1)
    return tuple(dict.fromkeys(found))


def total_entries(matrices: Iterable[Matrix]) -> int:
    return sum(matrix.entries for matrix in matrices)
