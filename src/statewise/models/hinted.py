"""Hinted Decoding, batched: two streams of one model, each with its own context, write one continuation.

The imitator's context holds an answer, the plain stream's does not. Both are rows of one batch and one cache and get the same
tokens; rows of texts that have ended leave, others enter; behind the delimiter a text needs its plain row only. Random
numbers are those of `models.generate`: the t-th token of text i is drawn by u_it of the stream (seed, "row", i).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from statewise.models.adapters import lean_adapters
from statewise.models.batching import (
    Batch,
    BatchedSampler,
    check_prompt,
    drawn_rows,
    evaluating,
    num_positions,
    read,
)
from statewise.models.cache import open_cache
from statewise.models.delimiter import Delimiter
from statewise.models.generate import check_drawn, stream
from statewise.models.hinted_law import Drawn, HintedLaw, check_hinted_law, draw_hinted

StopReason = Literal["stop", "length", "repeated", "delimiter"]


@dataclass(frozen=True, slots=True)
class HintedPrompt:
    """Ids of the two contexts. Without an imitator the plain stream writes alone (lambda = 1)."""

    plain: Sequence[int]
    imitator: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class HintedCompletion:
    """One value a token in each: ids (the stop token included), log-probability under the law, lambda, and
    phi = log p + H of the plain stream at temperature 1 (nats).

    delimiter_at: how many tokens there are up to and with the delimiter; None where none came.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    weights: tuple[float, ...]
    phi: tuple[float, ...]
    stop_reason: StopReason
    delimiter_at: int | None


@dataclass(frozen=True, slots=True)
class _Rules:
    """The law, the delimiter, and whether a text ends there."""

    law: HintedLaw
    mark: Delimiter | None
    stops: bool


@dataclass(eq=False)
class _Row:
    """A text in one of its contexts."""

    text: _Text
    prompt: Sequence[int]
    is_imitator: bool

    @property
    def ended(self) -> bool:
        return self.text.ended or (self.is_imitator and self.text.delimiter_at is not None)

    @property
    def limit(self) -> int:
        return self.text.limit

    @property
    def room(self) -> int:
        return self.text.limit - len(self.text.tokens)


@dataclass(eq=False)
class _Text:
    """A text on its way; `uniforms`: one number a new token."""

    index: int
    prompt: HintedPrompt
    limit: int
    uniforms: np.ndarray
    tokens: list[int] = field(default_factory=list)
    values: list[tuple[float, float, float]] = field(default_factory=list)
    windows: Counter[tuple[int, ...]] = field(default_factory=Counter)
    rows: tuple[_Row, ...] = ()
    ended: bool = False
    stop_reason: StopReason = "length"
    delimiter_at: int | None = None

    def __post_init__(self) -> None:
        contexts = [(self.prompt.plain, False)] + ([(self.prompt.imitator, True)] if self.prompt.imitator else [])
        self.rows = tuple(_Row(self, ids, is_imitator) for ids, is_imitator in contexts)

    @property
    def deciding(self) -> _Row:
        """The imitator's row while it takes part, else the plain one."""
        return self.rows[0] if self.delimiter_at is not None else self.rows[-1]

    def fixed_weight(self, law: HintedLaw) -> float:
        """lambda of the next token where the rule does not decide it, else NaN."""
        if len(self.rows) == 1 or self.delimiter_at is not None:
            return 1.0
        return 0.0 if law.first_from_imitator and not self.tokens else math.nan

    def append(self, token: int, values: tuple[float, float, float], rules: _Rules) -> None:
        check_drawn(values[0], self.index, len(self.tokens))
        self.tokens.append(token)
        self.values.append(values)
        if self.delimiter_at is None and rules.mark and rules.mark.just_came(self.tokens):
            self.delimiter_at = len(self.tokens)
        reason = self._reason(rules)
        self.stop_reason, self.ended = reason or "length", reason is not None or len(self.tokens) == self.limit

    def _reason(self, rules: _Rules) -> StopReason | None:
        law = rules.law
        if self.tokens[-1] in law.stop_ids:
            return "stop"
        if rules.stops and self.delimiter_at is not None:
            return "delimiter"
        if law.repeat_count and len(self.tokens) >= law.repeat_window:
            window = tuple(self.tokens[-law.repeat_window :])
            self.windows[window] += 1
            if self.windows[window] >= law.repeat_count:
                return "repeated"
        return None

    def completion(self) -> HintedCompletion:
        logprobs, weights, phi = zip(*self.values, strict=True) if self.values else ((), (), ())
        return HintedCompletion(tuple(self.tokens), logprobs, weights, phi, self.stop_reason, self.delimiter_at)


class HintedDecoder(BatchedSampler):
    """Texts that two streams of a transformers or PEFT model write together.

    count(read, completions): told of what was read beside the new tokens, and of the texts, after each call.
    """

    count: Callable[[Sequence[Sequence[int]], Sequence[HintedCompletion]], None] | None = None

    def decode(
        self,
        prompts: Sequence[HintedPrompt],
        law: HintedLaw,
        *,
        delimiter: Delimiter | None = None,
        stop_at_delimiter: bool = False,
        rows: Sequence[int] | None = None,
    ) -> list[HintedCompletion]:
        """One text a prompt, in the order of the prompts.

        delimiter: behind it the plain stream writes alone (or the text ends: stop_at_delimiter). rows: numbers that name
        each text's random stream (default 0, 1, ...). A text ends at `law.max_tokens` or where one of its contexts is full.
        Raises DataError for a context that is empty or full from the start, RecipeError for a law that is none.
        """
        check_hinted_law(law)
        limits = [self._limit(prompt, law, index) for index, prompt in enumerate(prompts)]
        names = range(len(prompts)) if rows is None else rows
        # Long contexts first, so that later ones fit beside what is left of them.
        order = sorted(range(len(prompts)), key=lambda i: (-_longest(prompts[i]), i))
        queue = deque(_Text(i, prompts[i], limits[i], stream(law.seed, names[i], limits[i])) for i in order)
        done: dict[int, HintedCompletion] = {}
        with evaluating(self.model), lean_adapters(self.model), torch.no_grad():
            for text in self._finished(queue, _Rules(law, delimiter, stop_at_delimiter)):
                done[text.index] = text.completion()
                if self.progress is not None:
                    self.progress(len(done), len(prompts))
        completions = [done[index] for index in range(len(prompts))]
        if self.count is not None:
            self.count([_read_beside(*pair) for pair in zip(prompts, completions, strict=True)], completions)
        return completions

    def _limit(self, prompt: HintedPrompt, law: HintedLaw, index: int) -> int:
        context = num_positions(self.model)
        for name, ids in (("plain", prompt.plain), ("hinted", prompt.imitator)):
            if ids is not None:
                check_prompt(ids, context, f"{name} prompt {index}")
        return min(law.max_tokens, context - _longest(prompt))

    def _read(self, items: list[_Text], rules: _Rules) -> list[Batch]:
        """The streams in a batch each, since their prompts differ in length."""
        rows = [row for text in items for row in text.rows]
        kinds = [rows]
        if open_cache(self.model) is not None:
            kinds = [[row for row in rows if row.is_imitator is wanted] for wanted in (False, True)]
        pieces = [read(self.model, kind, self.pad_id) for kind in kinds if kind]
        places: dict[_Row, int] = {}
        start = 0
        for batch, logits in pieces:
            places |= {row: start + at for row, at in zip(batch.rows, batch.at.tolist(), strict=True)}
            start += len(logits)
        self._append(items, torch.cat([logits for _, logits in pieces]), places, rules)
        for batch, _ in pieces:
            batch.ids = batch.ids.new_tensor([row.text.tokens[-1] for row in batch.rows])
        return [batch for batch, _ in pieces]

    def _step(self, batch: Batch, rules: _Rules) -> list[_Text]:
        going = [batch.rows[place] for place in batch.alive]
        texts = [row.text for row in going if not row.is_imitator]
        places = batch.ids.new_tensor(batch.alive)
        self._append(texts, batch.feed(self.model), {row: place for place, row in enumerate(batch.rows)}, rules)
        batch.put(places, batch.ids.new_tensor([row.text.tokens[-1] for row in going]))
        return [text for text in texts if text.ended]

    def _append(self, texts: Sequence[_Text], logits: Tensor, places: dict[_Row, int], rules: _Rules) -> None:
        """Draw the next token of every text from the logits at its rows' places, a few texts at a time."""
        size = max(1, drawn_rows(logits) // 2)
        for start in range(0, len(texts), size):
            part = texts[start : start + size]
            plain = logits.new_tensor([places[text.rows[0]] for text in part], dtype=torch.long)
            imitator = logits.new_tensor([places[text.deciding] for text in part], dtype=torch.long)
            fixed = logits.new_tensor([text.fixed_weight(rules.law) for text in part], dtype=torch.float32)
            u = logits.new_tensor([text.uniforms[len(text.tokens)] for text in part], dtype=torch.float64)
            drawn = draw_hinted(logits[imitator], logits[plain], fixed, u, rules.law)
            _extend(part, drawn, rules)


def _extend(texts: Sequence[_Text], drawn: Drawn, rules: _Rules) -> None:
    values = zip(drawn.logprobs.tolist(), drawn.weights.tolist(), drawn.phi.tolist(), strict=True)
    for text, token, value in zip(texts, drawn.tokens.tolist(), values, strict=True):
        text.append(token, value, rules)


def _read_beside(prompt: HintedPrompt, completion: HintedCompletion) -> Sequence[int]:
    """The contexts, and the text once more where the imitator read it too."""
    hinted = (*prompt.imitator, *completion.tokens[: completion.delimiter_at]) if prompt.imitator else ()
    return (*prompt.plain, *hinted)


def _longest(prompt: HintedPrompt) -> int:
    return max(len(prompt.plain), len(prompt.imitator or ()))
