"""Optimizers from torch and transformers, and the learning-rate multiplier as a function of the run's progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from statewise.errors import MissingExtra
from statewise.settings import OptimSettings

# Decay is for matrices; norms, biases and other vectors are left alone, as in transformers' Trainer.
VIRTUAL_STEPS = 10_000  # resolution of a schedule over a budget whose number of steps is not known beforehand


def build_optimizer(module: nn.Module, settings: OptimSettings) -> torch.optim.Optimizer:
    """The optimizer over trainable parameters: one group with weight decay (matrices), one without."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    kind, options = settings.optimizer, dict(settings.options)
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, **options)
    if kind == "adafactor":
        from transformers import Adafactor

        return Adafactor(groups, lr=settings.lr, relative_step=False, scale_parameter=False, **options)
    if kind == "adamw_8bit":
        return _adamw_8bit(groups, settings, options)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, **options)


def _adamw_8bit(
    groups: list[dict[str, Any]], settings: OptimSettings, options: dict[str, Any]
) -> torch.optim.Optimizer:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        raise MissingExtra("bitsandbytes", "bitsandbytes", "optim.optimizer = 'adamw_8bit'") from None
    return AdamW8bit(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, **options)


def schedule(settings: OptimSettings, num_steps: int | None) -> Callable[[int, float], float]:
    """`multiplier(step, progress)` of the learning rate, by transformers' get_scheduler.

    With a known number of steps it is transformers' own value at that step; for budgets in tokens or seconds the curve is
    laid over the progress in [0, 1]. A multiplier is a function of (step, progress) alone, so a resumed run continues it.
    """
    from transformers import get_scheduler

    total = num_steps or VIRTUAL_STEPS
    warmup = round(settings.warmup * total) if settings.warmup < 1 else round(settings.warmup)
    name = "constant_with_warmup" if settings.schedule == "constant" else settings.schedule
    probe = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    curve = get_scheduler(name, probe, num_warmup_steps=warmup, num_training_steps=total).lr_lambdas[0]
    if num_steps:
        return lambda step, progress: float(curve(step))
    return lambda step, progress: float(curve(round(progress * total)))
