"""RPSFT's penalty: the block of W_0 between its leading singular directions is kept (arXiv 2605.10973)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from statewise.settings import Rpsft
from statewise.training.hooks import Hook
from statewise.training.subspace import leading


class KeepLeading(Hook):
    """Adds the gradient of coef x sum ||U^T D V||_F^2, which is 2 coef U U^T D V V^T, D = W - W_0, before clipping."""

    def __init__(self, settings: Rpsft, kept: dict[str, nn.Parameter], start: dict[str, Tensor]):
        self.kept, self.start, self.settings = kept, start, settings
        self.bases = {name: leading(start[name].double(), settings.rank, "both").to(p) for name, p in kept.items()}
        self.scale = {name: self._scale(name) for name in kept}
        self.penalty = 0.0

    def _scale(self, name: str) -> float:
        if not self.settings.normalised:
            return self.settings.coef
        return self.settings.coef / float(self.bases[name].project(self.start[name].float()).double().square().sum())

    @torch.no_grad()
    def before_update(self) -> None:
        self.penalty = 0.0
        for name, parameter in self.kept.items():
            if parameter.grad is None:
                continue
            block = self.bases[name].project(parameter.float() - self.start[name].float())
            parameter.grad.add_(2 * self.scale[name] * block)
            self.penalty += self.scale[name] * float(block.double().square().sum())

    def after_step(self, step: int) -> dict[str, float]:
        """`rpsft/penalty`: its value before the step's last update, not part of `loss`."""
        return {"rpsft/penalty": self.penalty}
