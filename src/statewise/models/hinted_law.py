"""The law of Hinted Decoding: one next-token distribution made of two streams of the same model.

The imitator I has seen an answer, the plain stream m has not:

    lambda = rule(H_I / ln V),    log mix = (1 - lambda) log p_I + lambda log p_m + const,    H_I at temperature 1

`mix` minimises (1 - lambda) KL(mix || p_I) + lambda KL(mix || p_m): where the imitator is sure it decides, where it
is not the plain stream does. Source: arXiv 2602.12222, section on Hinted Decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from statewise.errors import RecipeError
from statewise.models.law import draw, restricted
from statewise.types import Sampling

# log-probabilities of -inf become this: 0 x -inf would be NaN.
LEAST_LOGPROB = -1e30
CENTRE = 0.5  # of the sigmoid rule, as a share of ln V

Rule = Literal["linear", "sigmoid", "piecewise"]


@dataclass(frozen=True)
class HintedLaw:
    """How a token is made of the two streams, and when a text ends.

    rule of lambda, the weight of the plain stream, with h = H_I / ln V in [0, 1]:
      "linear"     clip(beta h, 0, 1)
      "sigmoid"    1 / (1 + exp(-beta (h - 0.5)))
      "piecewise"  0 up to h = low, 1 from h = high on, linear between; beta is not used
    order: "nucleus_first" keeps the smallest set with mass top_p of the mixture and then divides by the temperature;
    "temperature_first" is the order of most samplers, and keeps fewer tokens where temperature < 1. temperature 0 is greedy.
    first_from_imitator: the first token is drawn with lambda = 0.
    repeat_window, repeat_count: a text ends where its last `repeat_window` tokens stood in it `repeat_count` times
    (repeat_count 0: never).
    """

    max_tokens: int
    beta: float = 3.0
    rule: Rule = "linear"
    low: float = 0.3
    high: float = 0.7
    temperature: float = 0.3
    top_p: float = 0.95
    order: Literal["nucleus_first", "temperature_first"] = "nucleus_first"
    first_from_imitator: bool = True
    repeat_window: int = 30
    repeat_count: int = 5
    stop_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Drawn:
    """Of one token a row: ids, log-probability under the law, lambda, and phi = log p_m + H[p_m] of the plain stream."""

    tokens: Tensor
    logprobs: Tensor
    weights: Tensor
    phi: Tensor


def plain_weight(entropy: Tensor, num_tokens: int, law: HintedLaw) -> Tensor:
    """lambda in [0, 1] from the imitator's entropy (nats); `num_tokens`: V, the width of the logits."""
    share = entropy / math.log(num_tokens)
    rules: dict[str, Callable[[], Tensor]] = {
        "linear": lambda: law.beta * share,
        "sigmoid": lambda: torch.sigmoid(law.beta * (share - CENTRE)),
        "piecewise": lambda: (share - law.low) / (law.high - law.low),
    }
    return rules[law.rule]().clamp(0, 1)


def mixture(imitator: Tensor, plain: Tensor, weights: Tensor) -> Tensor:
    """log mix [B, V] (nats) from log-probabilities [B, V] and lambda [B]; exactly one of them where lambda is 0 or 1."""
    w = weights[:, None]
    mixed = (1 - w) * imitator.clamp_min(LEAST_LOGPROB) + w * plain.clamp_min(LEAST_LOGPROB)
    return torch.where((w > 0) & (w < 1), mixed.log_softmax(-1), mixed)


def narrowed(mixed: Tensor, law: HintedLaw) -> Tensor:
    """Logits [B, V] of the law from log mix: top_p and the temperature (above 0) in the order that the law says."""
    if law.order == "temperature_first":
        return restricted(mixed / law.temperature, mixed.shape[-1], law.top_p)
    return restricted(mixed, mixed.shape[-1], law.top_p) / law.temperature


def draw_hinted(imitator: Tensor, plain: Tensor, fixed: Tensor, uniforms: Tensor, law: HintedLaw) -> Drawn:
    """A token a row from the streams' logits [B, V] by uniforms [B].

    fixed [B]: lambda where it is given, such as 1 behind the delimiter; NaN where the rule decides.
    """
    log_i, log_m = (_wide(logits).log_softmax(-1) for logits in (imitator, plain))
    ruled = plain_weight(_entropy(log_i), imitator.shape[-1], law)
    weights = torch.where(fixed.isnan(), ruled, fixed.to(ruled.dtype))
    mixed = mixture(log_i, log_m, weights)
    if law.temperature == 0:
        tokens, logprobs = draw(mixed, uniforms, Sampling(1, temperature=0.0))
    else:
        tokens, logprobs = draw(narrowed(mixed, law), uniforms, Sampling(1))
    phi = log_m.gather(-1, tokens[:, None])[:, 0] + _entropy(log_m)
    return Drawn(tokens, logprobs, weights, phi)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _entropy(logprobs: Tensor) -> Tensor:
    """H (nats) of log-probabilities [B, V]."""
    return -torch.linalg.vecdot(logprobs.exp(), logprobs.clamp_min(LEAST_LOGPROB))


def check_hinted_law(law: HintedLaw) -> None:
    """Raises RecipeError where the settings are no law."""
    rules = {
        "max_tokens": (law.max_tokens >= 0, ">= 0"),
        "beta": (0 <= law.beta < math.inf, ">= 0 (0: the imitator alone, with rule 'linear')"),
        "low": (0 <= law.low < law.high, "at least 0 and below high"),
        "high": (law.high <= 1, "at most 1"),
        "temperature": (0 <= law.temperature < math.inf, ">= 0 (0 is greedy)"),
        "top_p": (0 < law.top_p <= 1, "in (0, 1] (1 keeps all tokens)"),
        "repeat_window": (law.repeat_window >= 1, ">= 1"),
        "repeat_count": (law.repeat_count == 0 or law.repeat_count >= 2, ">= 2, or 0 to never stop for repetition"),
    }
    for name, (holds, expected) in rules.items():
        if not holds:
            raise RecipeError(f"hinted decoding: {name}: received {getattr(law, name)}, expected {expected}.")
