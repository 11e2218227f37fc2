"""Sampling from a transformers causal language model in this process.

The t-th new token of row i is the inverse of the cumulative distribution at u_it, where u_i is the stream named
(seed, "row", i): it does not depend on which rows share a batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from statewise.errors import DataError, RecipeError, StatewiseError
from statewise.models.head import unwrap
from statewise.models.load import LoadedPolicy
from statewise.types import Completion, Sampling, derive_seed


@dataclass
class _Row:
    """A prompt on its way. `limit`: most new tokens; `uniforms`: one a new token."""

    index: int
    prompt: Sequence[int]
    limit: int
    uniforms: np.ndarray
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False
    stop_reason: Literal["stop", "length"] = "length"

    def append(self, token: int, logprob: float, stop_ids: Sequence[int]) -> None:
        if math.isnan(logprob):
            raise StatewiseError(
                f"prompt {self.index}: the model's logits are NaN after {len(self.tokens)} new tokens, so there is "
                'nothing to sample from. Its weights are broken, or its dtype is too narrow: try dtype = "float32".'
            )
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in stop_ids:
            self.stop_reason = "stop"
        self.ended = self.stop_reason == "stop" or len(self.tokens) == self.limit


class InProcessSampler:
    """The `Sampler` protocol on a transformers or PEFT model.

    A batch holds at most `max_rows` rows and `batch_tokens` tokens, prompts and room for completions included; finished
    rows leave it. `progress(done, total)` is called as rows finish.
    """

    def __init__(
        self,
        model: Any,
        *,
        pad_id: int,
        batch_tokens: int = 8192,
        max_rows: int = 64,
        progress: Callable[[int, int], None] | None = None,
    ):
        self.pad_id, self.batch_tokens, self.max_rows, self.progress = pad_id, batch_tokens, max_rows, progress
        self.load(model)

    def load(self, policy: Any) -> None:
        """Sample from this model, or the model of a LoadedPolicy, from now on."""
        self.model = policy.model if isinstance(policy, LoadedPolicy) else policy

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, rows: Sequence[int] | None = None
    ) -> list[Completion]:
        """One completion a prompt, in the order of the prompts.

        rows: numbers that name each prompt's random stream (default 0, 1, ...), so that a part of a larger list draws
        what it would draw inside it. A completion ends at `max_tokens` or where the model has no position left.
        Raises DataError for a prompt that is empty or fills the context, RecipeError for a sampling law that is none.
        """
        _check(sampling)
        limits = self._limits(prompts, sampling)
        names = range(len(prompts)) if rows is None else rows
        limits = self._limits(prompts, sampling)
        done: dict[int, Completion] = {}
        with evaluating(self.model), torch.no_grad():
            for group in self._groups(prompts, limits):
                streams = {i: np.random.default_rng(derive_seed(sampling.seed, "row", int(names[i]))) for i in group}
                batch = [_Row(i, prompts[i], limits[i], streams[i].random(limits[i])) for i in group]
                for row in self._decode(batch, sampling):
                    done[row.index] = Completion(tuple(row.tokens), tuple(row.logprobs), row.stop_reason)
                    if self.progress is not None:
                        self.progress(len(done), len(prompts))
        return [done[index] for index in range(len(prompts))]

    def _limits(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[int]:
        """Most new tokens of each row."""
        context = num_positions(self.model)
        for index, prompt in enumerate(prompts):
            if not 0 < len(prompt) < context:
                raise DataError(
                    f"prompt {index}: received {len(prompt)} tokens, expected at least 1 and fewer than the model's "
                    f"{context} positions; shorten it, or give it a first token such as BOS."
                )
        return [min(sampling.max_tokens, context - len(prompt)) for prompt in prompts]

    def _groups(self, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> Iterator[list[int]]:
        """Indices by falling prompt length, cut where a batch is full."""
        order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
        group: list[int] = []
        width = 0
        for index in order:
            width = max(width, len(prompts[index]) + limits[index])
            if group and (len(group) == self.max_rows or (len(group) + 1) * width > self.batch_tokens):
                yield group
                group, width = [], len(prompts[index]) + limits[index]
            group.append(index)
        if group:
            yield group

    def _decode(self, rows: list[_Row], sampling: Sampling) -> Iterator[_Row]:
        """The rows of one batch, each as it ends."""
        if sampling.max_tokens == 0:
            yield from rows
            return
        ids, mask = self._left_padded([row.prompt for row in rows])
        cache = None
        for step in range(sampling.max_tokens):
            out, cache = forward_cached(self.model, ids, mask, cache, logits_to_keep=1)
            logits = out.logits[:, -1]
            uniforms = torch.tensor([row.uniforms[step] for row in rows], dtype=torch.float64, device=logits.device)
            picked, scores = draw(logits, uniforms, sampling)
            for row, token, score in zip(rows, picked.tolist(), scores.tolist(), strict=True):
                row.append(token, score, sampling.stop_ids)
            yield from (row for row in rows if row.ended)
            keep = [place for place, row in enumerate(rows) if not row.ended]
            if not keep:
                return
            ids, mask = picked[:, None], torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
            if len(keep) < len(rows):
                rows = [rows[place] for place in keep]
                kept = torch.tensor(keep, device=logits.device)
                ids, mask = ids[kept], mask[kept]
                cache.reorder_cache(kept)

    def _left_padded(self, prompts: list[Sequence[int]]) -> tuple[Tensor, Tensor]:
        device = next(self.model.parameters()).device
        width = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), width), self.pad_id, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
            mask[row, width - len(prompt) :] = 1
        return ids.to(device), mask.to(device)


def forward_cached(module: Any, ids: Tensor, mask: Tensor, cache: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Output of a model or its backbone on new columns `ids`, and the cache that then holds them.

    mask: of the cached columns and the new ones; positions count its ones. What the module does not take is left out.
    """
    accepted = inspect.signature(unwrap(module).forward).parameters
    kwargs["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    known = {name: value for name, value in kwargs.items() if name in accepted}
    name = "cache" if "cache" in accepted else "past_key_values"  # transformers renamed it
    out = module(input_ids=ids, attention_mask=mask, use_cache=True, **{name: cache}, **known)
    return out, out[name]


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Token ids [B] drawn from logits [B, V] by uniforms [B], and their log-probabilities under the sampling law.

    The law is softmax(logits / temperature) renormalised on the tokens that top_k, then top_p keep. Temperature 0 takes
    the most probable token and gives its log-probability at temperature 1.
    """
    z = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.temperature == 0:
        picked = z.argmax(-1)
        return picked, z.log_softmax(-1).gather(-1, picked[:, None])[:, 0]
    z = z / sampling.temperature
    if sampling.top_k or sampling.top_p < 1:
        z = _restricted(z, sampling.top_k or z.shape[-1], sampling.top_p)
    log_p = z.log_softmax(-1)
    cdf = log_p.double().exp().cumsum(-1)
    target = uniforms.double()[:, None] * cdf[:, -1:]
    picked = torch.searchsorted(cdf, target, right=True)
    # u x total can round up to the total: then the last token that has any mass is meant.
    last = (cdf < cdf[:, -1:]).sum(-1, keepdim=True)
    picked = torch.minimum(picked, last)
    return picked[:, 0], log_p.gather(-1, picked)[:, 0]


def _restricted(z: Tensor, top_k: int, top_p: float) -> Tensor:
    """-inf outside the k most probable tokens and, among those, outside the smallest set with mass `top_p`."""
    ordered, order = z.sort(dim=-1, descending=True, stable=True)
    ordered[:, top_k:] = -torch.inf
    p = ordered.softmax(-1)
    ordered = ordered.masked_fill(p.cumsum(-1) - p >= top_p, -torch.inf)
    return torch.empty_like(z).scatter_(-1, order, ordered)


def num_positions(model: Any) -> int:
    """The longest sequence that the model takes, by its config; a very large number where it names none."""
    config = unwrap(model).config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None) or 1 << 60


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """The model in eval mode; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _check(sampling: Sampling) -> None:
    rules = {
        "max_tokens": (sampling.max_tokens >= 0, ">= 0"),
        "temperature": (0 <= sampling.temperature < float("inf"), ">= 0 (0 is greedy)"),
        "top_p": (0 < sampling.top_p <= 1, "in (0, 1] (1 keeps all tokens)"),
        "top_k": (sampling.top_k >= 0, ">= 0 (0 keeps all tokens)"),
    }
    for name, (holds, expected) in rules.items():
        if not holds:
            raise RecipeError(f"sampling.{name}: received {getattr(sampling, name)}, expected {expected}.")
