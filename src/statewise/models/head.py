"""The output head of a causal language model, split from its backbone.

A head is logits = cap(scale * (sum_i h_i W_i^T + bias)) / temperature, with cap(z) = c tanh(z / c) or the identity. One
pair (h_i, W_i) is the ordinary head; a LoRA on the head adds the pair (s h A^T, B).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Projection:
    """What makes logits of [N, D] hidden rows. `pairs`: ((hidden_i [N, D_i], weight_i [V, D_i]), ...)."""

    pairs: tuple[tuple[Tensor, Tensor], ...]
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @property
    def num_rows(self) -> int:
        return self.pairs[0][0].shape[0]

    @property
    def num_tokens(self) -> int:
        """V"""
        return self.pairs[0][1].shape[0]

    @property
    def device(self) -> torch.device:
        return self.pairs[0][0].device

    def logits(self, rows: slice, dtype: torch.dtype | None = None) -> Tensor:
        """Float32 logits [n, V] of the rows, after scale, cap, temperature; products run in `dtype` (default: the weight's)."""
        z = None
        for hidden, weight in self.pairs:
            kind = dtype or weight.dtype
            part = hidden[rows].to(kind) @ weight.to(kind).T
            part = part.float() if part.dtype != torch.float64 else part
            z = part if z is None else z.add_(part)
        assert z is not None
        if self.bias is not None:
            z = z + self.bias.to(z.dtype)
        if self.scale != 1.0:
            z = z * self.scale
        if self.softcap is not None:
            z = torch.tanh(z / self.softcap) * self.softcap
        return z if self.temperature == 1.0 else z / self.temperature


@dataclass(frozen=True)
class FullLogits:
    """The fallback: logits [N, V] that the model itself made, before the temperature."""

    full: Tensor
    temperature: float = 1.0

    @property
    def num_rows(self) -> int:
        return self.full.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.full.shape[1]

    @property
    def device(self) -> torch.device:
        return self.full.device

    def logits(self, rows: slice, dtype: torch.dtype | None = None) -> Tensor:
        part = self.full[rows]
        # A copy: callers work in place, and these are the model's own logits.
        part = part.to(torch.float64 if part.dtype == torch.float64 else torch.float32, copy=True)
        return part if self.temperature == 1.0 else part / self.temperature


@dataclass(frozen=True)
class Head:
    """The output layer of a model and what the model does to its logits."""

    layer: Any
    scale: float = 1.0
    softcap: float | None = None

    def project(self, hidden_ND: Tensor) -> Projection:
        """The projection of hidden rows; a LoRA adapter on the layer becomes a second pair."""
        layer = self.layer
        base = getattr(layer, "base_layer", layer)
        pairs = [(hidden_ND, base.weight)]
        if base is not layer and not getattr(layer, "disable_adapters", False) and not layer.merged:
            for name in layer.active_adapters:
                if name in layer.lora_A:
                    dropped = layer.lora_dropout[name](hidden_ND)
                    down = layer.lora_A[name]
                    reduced = (dropped.to(down.weight.dtype) @ down.weight.T) * layer.scaling[name]
                    pairs.append((reduced, layer.lora_B[name].weight))
        return Projection(tuple(pairs), getattr(base, "bias", None), self.scale, self.softcap)


def unwrap(model: Any) -> Any:
    """The transformers model inside a PEFT wrapper."""
    from peft import PeftModel

    return model.get_base_model() if isinstance(model, PeftModel) else model


def backbone(model: Any) -> nn.Module:
    """The part of a transformers causal LM that makes hidden states."""
    inner = unwrap(model)
    return inner.get_decoder() if hasattr(inner, "get_decoder") else getattr(inner, inner.base_model_prefix)


def split_head(model: Any) -> Head | None:
    """The model's head, or None (announced once) where own logits differ from the model's, so that the fallback is used.

    Scale and soft-cap are read from the config; the model's own logits on eight tokens decide whether they are right.
    """
    inner = unwrap(model)
    layer = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    reason = "the model has no output embedding layer"
    if layer is not None and _is_linear(layer):
        config = inner.config.get_text_config() if hasattr(inner.config, "get_text_config") else inner.config
        for scale in _scales(config):
            head = Head(layer, scale, getattr(config, "final_logit_softcapping", None))
            reason = _disagreement(model, head)
            if not reason:
                return head
    elif layer is not None:
        reason = f"the output layer is a {type(layer).__name__}, not a linear layer"
    warnings.warn(f"one-pass head not used: {reason}; full logits are used, which takes more memory.", stacklevel=2)
    return None


def _is_linear(layer: nn.Module) -> bool:
    base = getattr(layer, "base_layer", layer)
    plain = isinstance(base, nn.Linear) and type(base).__name__ == "Linear"
    return plain and (base is layer or hasattr(layer, "lora_A"))


def _scales(config: Any) -> list[float]:
    """What the config may mean by its scale: families multiply (Cohere, Falcon-H1) or divide (Granite) by it."""
    scales = []
    for name in ("logits_scaling", "logit_scale", "output_multiplier", "lm_head_multiplier"):
        value = getattr(config, name, None)
        if isinstance(value, int | float) and value > 0:
            scales += [float(value)] if name != "logits_scaling" else [1.0 / value, float(value)]
    return [*scales, 1.0]


@torch.no_grad()
def _disagreement(model: Any, head: Head) -> str:
    """Empty where our logits equal the model's on eight fixed tokens, else what differs."""
    inner, training = unwrap(model), model.training
    device = head.layer.base_layer.weight.device if hasattr(head.layer, "base_layer") else head.layer.weight.device
    ids = torch.arange(8, device=device)[None] % inner.get_input_embeddings().num_embeddings
    model.eval()
    try:
        expected = model(input_ids=ids, use_cache=False).logits[0].float()
        hidden = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state[0]
        ours = head.project(hidden).logits(slice(None))
    except Exception as error:
        return f"the model could not be split ({type(error).__name__}: {error})"
    finally:
        model.train(training)
    if ours.shape != expected.shape:
        return f"own logits have shape {tuple(ours.shape)}, the model's {tuple(expected.shape)}"
    gap = (ours - expected).abs().max().item()
    limit = 1e-3 if head.layer.weight.dtype == torch.float32 else 0.05
    return "" if gap <= limit * expected.abs().max().clamp_min(1).item() else f"own logits differ by {gap:.3g}"
