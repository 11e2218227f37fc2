"""Checkpoints as streams of tensors: directories, shards, PEFT adapters, runs and hub ids. No model is built.

A `Checkpoint` gives a tensor by name, whole or by rows. An adapter gives its base's tensors, and for those that it trains
the change as factors: W+ = W0 + scale B A.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statewise.errors import CheckpointError
from statewise.geometry.tensors import Tensor, read_directory

if TYPE_CHECKING:
    import torch

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
PEFT_PREFIX = "base_model.model."
HUB_FILES = ["*.safetensors", "*.json"]


@dataclass(frozen=True)
class LowRank:
    """D = left @ right, [m, r] @ [r, n] in float64; the scale is in `left`."""

    left: torch.Tensor
    right: torch.Tensor


@dataclass(frozen=True)
class Weights:
    """A tensor's values: `stored` as the file has it, plus `delta` where an adapter changes it."""

    stored: torch.Tensor
    delta: LowRank | None = None

    def rows(self, low: int = 0, high: int | None = None) -> torch.Tensor:
        """Rows low to high; in the stored type, or in float64 where an adapter adds to them."""
        part = self.stored[low:high]
        return part if self.delta is None else part.double() + self.delta.left[low:high] @ self.delta.right

    def select(self, index: torch.Tensor | slice) -> Weights:
        """Some rows only."""
        delta = None if self.delta is None else replace(self.delta, left=self.delta.left[index])
        return Weights(self.stored[index], delta)


@dataclass(frozen=True)
class Checkpoint:
    """`label` is what the user called it. `base` is set for an adapter, whose `changes` then say what it adds where."""

    label: str
    path: Path
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    base: Checkpoint | None = None
    changes: dict[str, LoraChange] = field(default_factory=dict)

    def read(self, name: str) -> Weights:
        """The values of a tensor."""
        change = self.changes.get(name)
        stored = self.tensors[name].read()
        if change is None:
            return Weights(stored)
        if change.magnitude is not None:
            return Weights(_dora(stored, change.low_rank(), change.magnitude.read()))
        return Weights(stored, change.low_rank())

    @property
    def fingerprint(self) -> list[Any]:
        """What tells that the files are the same ones: names, sizes and times of change."""
        listed = [*self.tensors.values(), *(t for c in self.changes.values() for t in c.tensors)]
        files = sorted({t.file for t in listed})
        return [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files]


@dataclass(frozen=True)
class LoraChange:
    """The factors of one adapted tensor: A [r, in], B [out, r]; `transposed` where the base stores [in, out]."""

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None
    transposed: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)

    def low_rank(self) -> LowRank:
        left, right = self.b.read().double() * self.scale, self.a.read().double()
        return LowRank(right.T, left.T) if self.transposed else LowRank(left, right)


def open_checkpoint(name: str | Path) -> Checkpoint:
    """From a directory, a run (its newest whole checkpoint), "tiny", or a hub id. Raises CheckpointError."""
    path = locate(str(name))
    if (path / ADAPTER_CONFIG).is_file():
        return _adapter(str(name), path)
    return Checkpoint(str(name), path, read_directory(path), _json(path / CONFIG))


def locate(name: str) -> Path:
    """The directory that a name stands for; hub ids are downloaded, weights and JSON only."""
    from statewise.models.load import resolve

    path = Path(resolve(name))
    if (path / "run.json").is_file():
        steps = step_directories(path)
        if not steps:
            raise CheckpointError(f"{path}: is a run without a checkpoint; train it first.")
        return steps[max(steps)]
    if path.is_dir():
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise CheckpointError(f"{name}: no such directory, and no hub id either (those are OWNER/NAME).")
    return _download(name)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # of many kinds, all of which mean this
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{name}: no such directory, and it can't be had from the hub: {first}") from None


def step_directories(run: Path) -> dict[int, Path]:
    """A run's whole checkpoints by step, in order."""
    found = {int(p.parent.name[5:]): p.parent for p in (run / "checkpoints").glob("step_*/manifest.json")}
    return dict(sorted(found.items()))


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: can't be read: {error}") from None


def _adapter(label: str, path: Path) -> Checkpoint:
    """An adapter over its base. Raises CheckpointError for parts that are not of the base, and for kinds not known."""
    config = _json(path / ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path / ADAPTER_CONFIG}: peft_type is {config.get('peft_type')!r}, expected 'LORA'.")
    base = open_checkpoint(str(config.get("base_model_name_or_path")))
    tensors, changes = dict(base.tensors), dict[str, LoraChange]()
    found = {name.removeprefix(PEFT_PREFIX): t for name, t in read_directory(path, "adapter_model").items()}
    for name, tensor in found.items():
        target, _, part = name.partition(".lora_")
        if not part:
            target = name.replace("modules_to_save.", "").replace("base_layer.", "")
            tensors[target] = replace(tensor, name=target)
        elif part == "A.weight":
            changes[f"{target}.weight"] = _change(target, found, config)
    strange = sorted({*tensors, *changes} - set(base.tensors) - {"lm_head.weight"})
    unread = [n for n in found if ".lora_" in n and n.split(".lora_")[0] + ".weight" not in changes]
    if strange or unread:
        raise CheckpointError(
            f"{path}: {len(strange) + len(unread)} tensors don't fit the base '{base.label}', such as "
            f"'{(strange + unread)[0]}'. Give the base the adapter was trained on; embedding adapters aren't read."
        )
    return Checkpoint(label, path, tensors, base.config, base, changes)


def _change(target: str, found: dict[str, Tensor], config: dict[str, Any]) -> LoraChange:
    a, b = found[f"{target}.lora_A.weight"], found.get(f"{target}.lora_B.weight")
    if b is None:
        raise CheckpointError(f"{a.file}: has '{a.name}' but no lora_B beside it.")
    rank = _pattern(config, "rank_pattern", target, config["r"])
    alpha = _pattern(config, "alpha_pattern", target, config["lora_alpha"])
    magnitude = found.get(f"{target}.lora_magnitude_vector")
    scale = alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
    return LoraChange(a, b, scale, magnitude, bool(config.get("fan_in_fan_out")))


def _pattern(config: dict[str, Any], key: str, target: str, default: float) -> float:
    """The value for a module: of the first pattern that is its name or ends it, as in PEFT, else the default."""
    for pattern, value in (config.get(key) or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", target):
            return float(value)
    return float(default)


def _dora(stored: torch.Tensor, delta: LowRank, magnitude: torch.Tensor) -> torch.Tensor:
    """magnitude (W0 + D) / ‖W0 + D‖ by rows (DoRA, Liu et al. 2024), in float32."""
    whole = stored.double() + delta.left @ delta.right
    return (magnitude.double()[:, None] * whole / whole.norm(dim=1, keepdim=True)).float()
