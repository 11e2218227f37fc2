"""The law that tokens are drawn from, and drawing from it by given uniform numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from statewise.errors import RecipeError
from statewise.types import Sampling

BLOCK = 256  # tokens summed in the logits' own precision


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Token ids [B] drawn from logits [B, V] by uniforms [B], and their log-probabilities under the sampling law.

    The law is softmax(logits / temperature) renormalised on the tokens that top_k, then top_p keep. Temperature 0 takes
    the most probable token and gives its log-probability at temperature 1.
    """
    z = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.temperature == 0:
        picked = z.argmax(-1, keepdim=True)
        return picked[:, 0], (z.gather(-1, picked) - z.logsumexp(-1, keepdim=True))[:, 0]
    z = z / sampling.temperature
    if sampling.top_k or sampling.top_p < 1:
        z = restricted(z, sampling.top_k or z.shape[-1], sampling.top_p)
    z = z - z.amax(-1, keepdim=True)
    picked, total = _inverse(z.exp(), uniforms.double()[:, None])
    return picked[:, 0], (z.gather(-1, picked) - total.log().to(z.dtype))[:, 0]


def _inverse(mass: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Where the cumulative sum of mass [B, V] passes the share `uniforms` [B, 1] of its total, and the total [B, 1].

    First among blocks of tokens, then inside one, so that few sums are float64.
    """
    mass = torch.nn.functional.pad(mass, (0, -mass.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    sums = mass.sum(-1).double()
    cdf = sums.cumsum(-1)
    target = uniforms * cdf[:, -1:]
    block = _first_above(cdf, target)
    inside = mass.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].double().cumsum(-1)
    before = cdf.gather(1, block) - sums.gather(1, block)
    return block * BLOCK + _first_above(inside, target - before), cdf[:, -1:]


def _first_above(cdf: Tensor, target: Tensor) -> Tensor:
    """Index [B, 1] of the first entry above the target; by rounding there may be none: then of the last that has mass."""
    return torch.minimum(torch.searchsorted(cdf, target, right=True), (cdf < cdf[:, -1:]).sum(-1, keepdim=True))


def restricted(z: Tensor, top_k: int, top_p: float) -> Tensor:
    """-inf outside the k most probable tokens and, among those, outside the smallest set with mass `top_p`."""
    ordered, order = z.sort(dim=-1, descending=True, stable=True)
    ordered[:, top_k:] = -torch.inf
    p = ordered.softmax(-1)
    ordered = ordered.masked_fill(p.cumsum(-1) - p >= top_p, -torch.inf)
    return torch.empty_like(z).scatter_(-1, order, ordered)


def check_law(sampling: Sampling) -> None:
    """Raises RecipeError where the settings are no law."""
    rules = {
        "max_tokens": (sampling.max_tokens >= 0, ">= 0"),
        "temperature": (0 <= sampling.temperature < float("inf"), ">= 0 (0 is greedy)"),
        "top_p": (0 < sampling.top_p <= 1, "in (0, 1] (1 keeps all tokens)"),
        "top_k": (sampling.top_k >= 0, ">= 0 (0 keeps all tokens)"),
    }
    for name, (holds, expected) in rules.items():
        if not holds:
            raise RecipeError(f"sampling.{name}: received {getattr(sampling, name)}, expected {expected}.")
