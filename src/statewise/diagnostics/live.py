"""Weight matrices measured between two steps of a training.

geometry/frobenius        ||D||_F, the mean over matrices; D = W - W_start
geometry/relative_norm    ||D||_F / ||W_start||_F over all entries
geometry/stable_rank      ||D||_F^2 / sigma_1^2, the mean over matrices
geometry/top16_energy     share of ||D||_F^2 in the 16 leading directions, the mean over matrices (k in the name)
geometry/hill16           Hill estimate over the 16 largest singular values of D, the mean over matrices
geometry/unchanged_share  entries with the bf16 code that they started with: what a bf16 checkpoint would not show
geometry/visible_share    of the entries that the last step moved, those whose bf16 code it changed
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from statewise.errors import RecipeError
from statewise.training.hooks import Hook, matrices

if TYPE_CHECKING:
    from statewise.types import World

GRAM_SIDE = 512  # a short side up to which all singular values are had faster than the leading ones by iteration


class Watch(Hook):
    """Measures after every `every` steps; one step earlier it copies the matrices, to see the step itself."""

    def __init__(self, every: int, k: int, modules: list[str], world: World):
        self.every, self.k = every, k
        self.watched = Adapted(world.policy, modules) if hasattr(world.policy, "peft_config") else Full(world, modules)
        self.before: dict[str, Tensor] = {}
        self._copy_before(world.step + 1)

    @torch.no_grad()
    def after_step(self, step: int) -> dict[str, float]:
        """The metrics above in steps that `every` divides."""
        row = self._measured() if step % self.every == 0 else {}
        self._copy_before(step + 1)
        return row

    @torch.no_grad()
    def _copy_before(self, step: int) -> None:
        """If `step` will be measured, keep the matrices as they are before it."""
        due = step % self.every == 0
        self.before = {name: now.clone() for name, _, now, _ in self.watched.all()} if due else {}

    def _measured(self) -> dict[str, float]:
        from statewise.stats.spectra import hill, stable_rank, top_energy

        sums = dict.fromkeys(("delta", "start", "entries", "unchanged", "moved", "visible"), 0.0)
        means: dict[str, list[float]] = {
            n: [] for n in ("frobenius", "stable_rank", f"top{self.k}_energy", f"hill{self.k}")
        }
        for name, start, now, delta in self.watched.all():
            energy = float(delta.double().square().sum())
            sums["delta"] += energy
            sums["start"] += float(start.double().square().sum())
            sums["entries"] += start.numel()
            sums["unchanged"] += start.numel() - int(differs(start, now).sum())
            moved = self.before[name] != now
            sums["moved"] += int(moved.sum())
            sums["visible"] += int((moved & differs(self.before[name], now)).sum())
            if energy > 0:
                s = leading_values(delta, self.k)
                numbers = (energy**0.5, stable_rank(s, energy), top_energy(s, self.k, energy), hill(s, len(s)))
                for values, number in zip(means.values(), numbers, strict=True):
                    values.append(number)
        row = {name: sum(values) / len(values) for name, values in means.items() if values}
        row["relative_norm"] = (sums["delta"] / sums["start"]) ** 0.5 if sums["start"] else 0.0
        row["unchanged_share"] = sums["unchanged"] / sums["entries"]
        row["visible_share"] = sums["visible"] / sums["moved"] if sums["moved"] else 0.0
        return {f"geometry/{name}": value for name, value in row.items()}


def leading_values(delta: Tensor, k: int) -> np.ndarray:
    """The k largest singular values, float64: of the Gram matrix where it is small, else by certified iteration."""
    if min(delta.shape) > GRAM_SIDE:
        from statewise.geometry.krylov import leading

        return leading(delta.float(), k).s
    wide = delta.double() if delta.shape[0] <= delta.shape[1] else delta.double().T
    return torch.linalg.eigvalsh(wide @ wide.T).flip(0)[:k].clamp_min(0).sqrt().cpu().numpy()


def differs(a: Tensor, b: Tensor) -> Tensor:
    """Whether two tensors differ once they are rounded to bf16; 0 equals -0."""
    x, y = (t.to(torch.bfloat16).view(torch.int16) for t in (a, b))
    return (x != y) & (((x | y) & 0x7FFF) != 0)


class Full:
    """The matrices of a model that is trained as a whole, and those of the model that the run started from."""

    def __init__(self, world: World, modules: list[str]):
        self.kept = matrices(world.policy, modules)
        start = dict(world.open_model("step0").policy.model.named_parameters())
        self.start = {name: start[name].detach() for name in self.kept}

    def all(self) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """(name, W_start, W, D); gathered where it is sharded, so every rank must go through it."""
        for name, parameter in self.kept.items():
            now = parameter.detach()
            now = now.full_tensor() if hasattr(now, "full_tensor") else now
            yield name, self.start[name], now, now.float() - self.start[name].float()


class Adapted:
    """The matrices that a LoRA changes: base weights, base plus change, change."""

    def __init__(self, model: Any, modules: list[str]):
        if any(config.use_dora for config in model.peft_config.values()):
            raise RecipeError(
                "diagnostics: 'geometry' can't follow DoRA while it trains; compare its checkpoints instead."
            )
        if modules:
            raise RecipeError(
                "diagnostics: 'geometry' follows every module that an adapter changes; leave `modules` out."
            )
        named = model.named_modules()
        self.layers = {n: m for n, m in named if hasattr(m, "get_delta_weight") and hasattr(m, "base_layer")}

    def all(self) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """(name, W_0, W_0 + D, D)."""
        for name, layer in self.layers.items():
            start = layer.base_layer.weight.detach()
            delta = layer.get_delta_weight(layer.active_adapters[0]).detach().float()
            yield name, start, start.float() + delta, delta
