"""LoRA layers read with few operations while tokens are sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def lean_adapters(model: Any) -> Iterator[None]:
    """W x + scaling B (A x) of every LoRA layer in three matrix products of the base's dtype; afterwards as before.

    peft computes the adapter's part in the adapter's own dtype (float32) by six operations, which costs nearly half the time
    of a small sampled batch. The base isn't touched: merged into bf16 weights, small updates would be rounded away. Layers of
    another kind (DoRA, quantized, merged, disabled, several adapters at once) keep peft's way.
    """
    changed = []
    try:
        for layer in model.modules():
            forward = lean_forward(layer)
            if forward is not None:
                layer.forward = forward
                changed.append(layer)
        yield
    finally:
        for layer in changed:
            del layer.forward


def lean_forward(layer: Any) -> Callable[[Tensor], Tensor] | None:
    """The layer's map with its adapter cast to the dtype of the base; None where peft's own has to do it."""
    if "forward" in vars(layer) or not is_plain(layer):
        return None
    base, (name,) = layer.base_layer, layer.active_adapters
    down = layer.lora_A[name].weight.detach().to(base.weight.dtype).T
    up = (layer.lora_B[name].weight.detach() * layer.scaling[name]).to(base.weight.dtype).T

    def forward(x: Tensor) -> Tensor:
        out = base(x)
        out.flatten(0, -2).addmm_(x.flatten(0, -2) @ down, up)  # in place: a linear layer's output is contiguous
        return out

    return forward


def is_plain(layer: Any) -> bool:
    """Whether this is a linear layer under one enabled, unmerged LoRA without variants or a bias of its own."""
    if not hasattr(layer, "lora_A") or type(getattr(layer, "base_layer", None)) is not torch.nn.Linear:
        return False
    if layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return False
    name = layer.active_adapters[0]
    return name in layer.lora_A and name not in layer.lora_variant and layer.lora_B[name].bias is None
