"""A model behind the completions API of an OpenAI-compatible server: token ids in, token ids and log-probabilities out.

Every answer is checked: its ids, its lengths, that its numbers are log-probabilities. `probe.py` finds the way of asking
that a server understands.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from statewise.errors import EndpointError, StatewiseError
from statewise.models.http import Client
from statewise.models.law import check_law
from statewise.models.topk import TopK
from statewise.types import Completion, Sampling, derive_seed

ABOVE_ZERO = 1e-3  # nats by which rounding may lift a log-probability above 0
EVERY = 1 << 30
ID = "token_id:"  # how vLLM writes a token where return_tokens_as_token_ids is set


@dataclass(frozen=True)
class Asking:
    """How prompt log-probabilities are asked for: vLLM's `prompt_logprobs`, or `echo` of the completions API.

    max_tokens: the fewest that the server generates beside; named: its log-probabilities name token ids, not texts.
    """

    field: Literal["prompt_logprobs", "echo"] = "prompt_logprobs"
    max_tokens: int = 1
    named: bool = True

    def body(self, ids: Sequence[int], k: int) -> dict[str, Any]:
        """k: so many most probable tokens beside the prompt's own, -1 for all."""
        body: dict[str, Any] = {"prompt": list(ids), "max_tokens": self.max_tokens, "temperature": 0.0}
        if self.field == "prompt_logprobs":
            return {**body, "prompt_logprobs": k}
        named = {"return_tokens_as_token_ids": True} if self.named else {}
        return {**body, "echo": True, "logprobs": k or 1, **named}

    def read(self, choice: Mapping[str, Any], ids: Sequence[int], k: int) -> TopK:
        """Raises EndpointError with what is wrong."""
        if self.field == "prompt_logprobs":
            own, tops = _of_prompt(choice.get("prompt_logprobs"), ids)
        else:
            own, tops = _of_echo(choice.get("logprobs"), ids, self.named)
        return _topk(own, tops if self.named else [{}] * len(ids), k)


class Endpoint:
    """The model `model` at a server. asking: None where it gives no prompt log-probabilities.

    num_tokens: ids of the shared vocabulary; context: the longest sequence, None where the server doesn't say.
    """

    def __init__(
        self, client: Client, model: str, *, num_tokens: int, context: int | None = None, asking: Asking | None = None
    ):
        self.client, self.model, self.num_tokens = client, model, num_tokens
        self.context, self.asking = context, asking

    def choice(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The one choice of a completion. Raises EndpointError where there is another number."""
        answer = self.client.post("/completions", {"model": self.model, **body})
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise self.error(f"its answer has not one choice but {_short(choices)}")
        return choices[0]

    def topk(self, ids: Sequence[int], k: int, asking: Asking | None = None) -> TopK:
        """Log-probabilities of the ids, and the k most probable ones at each (all from `num_tokens` on)."""
        asking = asking or self.asking
        if asking is None:
            raise self.error("it gives no prompt log-probabilities")
        whole = k >= self.num_tokens
        choice = self.choice(asking.body(ids, -1 if whole else k))
        try:
            return asking.read(choice, ids, EVERY if whole else k)
        except EndpointError as error:
            raise self.error(str(error)) from None

    def complete(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        """One completion; its log-probabilities are as the server gives them."""
        limit = sampling.max_tokens if self.context is None else min(sampling.max_tokens, self.context - len(prompt))
        if limit < 1:
            return Completion((), (), "length")
        choice = self.choice(
            {
                "prompt": list(prompt),
                "max_tokens": limit,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                # A server takes what is not said from the model's generation config.
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "seed": seed,
                "stop_token_ids": list(sampling.stop_ids),
                "logprobs": 1,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                "skip_special_tokens": False,
            }
        )
        return self._completion(choice, limit, sampling)

    def _completion(self, choice: Mapping[str, Any], limit: int, sampling: Sampling) -> Completion:
        logprobs = choice.get("logprobs") or {}
        names = logprobs.get("tokens") or []
        tokens = choice.get("token_ids")
        if tokens is None and all(str(name).startswith(ID) for name in names):
            tokens = [int(str(name).removeprefix(ID)) for name in names]
        if not isinstance(tokens, list) or not tokens or not all(isinstance(t, int) for t in tokens):
            raise self.error(
                "its completion has no token ids, and text is never encoded again; expected `token_ids` (vLLM from 0.10.2 "
                "on gives them for return_token_ids)"
            )
        values = logprobs.get("token_logprobs")
        if not isinstance(values, list) or len(values) != len(tokens):
            raise self.error(f"its completion has {len(tokens)} tokens and {_count(values)} log-probabilities")
        alien = [t for t in tokens if not 0 <= t < self.num_tokens]
        if alien or len(tokens) > limit:
            what = f"id {alien[0]}, and the policy has {self.num_tokens}" if alien else f"more than {limit} tokens"
            raise self.error(f"its completion has {what}")
        try:
            checked = tuple(_logprob(v, f"token {i} of a completion") for i, v in enumerate(values))
        except EndpointError as error:
            raise self.error(str(error)) from None
        return Completion(tuple(tokens), checked, self._end(choice, tokens, sampling))

    def _end(self, choice: Mapping[str, Any], tokens: list[int], sampling: Sampling) -> Literal["stop", "length"]:
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise self.error(f"its completion ended with {reason!r}; expected 'stop' or 'length'")
        if reason == "length" or tokens[-1] in sampling.stop_ids:
            return "length" if reason == "length" else "stop"
        warnings.warn(
            f"teacher '{self.model}' ends its text with id {tokens[-1]} and the policy stops at {sampling.stop_ids}: what "
            "it teaches about the end, the policy will not stop at.",
            stacklevel=2,
        )
        return "stop"

    def error(self, problem: str) -> EndpointError:
        return EndpointError(f"endpoint {self.client.url}, model '{self.model}': {problem}.")


class EndpointScorer:
    """The `Scorer` protocol on an endpoint: log-probabilities at temperature 1, as servers give them."""

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint

    def score(
        self, sequences: Sequence[Sequence[int]], needs: Sequence[str] = ("logprobs",), *, temperature: float = 1.0
    ) -> list[dict[str, Any]]:
        """Per sequence {"logprobs": one a token, 0 at the first}. Raises EndpointError for anything else."""
        if tuple(needs) != ("logprobs",) or temperature != 1.0:
            raise self.endpoint.error(
                f"asked for {', '.join(needs)} at temperature {temperature:g}; it gives log-probabilities at temperature 1"
            )
        return [{"logprobs": part.logprobs.tolist()} for part in self.topk(sequences, 0)]

    def topk(self, sequences: Sequence[Sequence[int]], k: int) -> list[TopK]:
        return self.endpoint.client.map(lambda ids: self.endpoint.topk(ids, k), sequences)


class EndpointSampler:
    """The `Sampler` protocol on an endpoint.

    processed: its log-probabilities are those of the law that was sampled from, not of temperature 1 and all tokens;
    None: not known. needs_law: somebody reads them; else they are NaN where the law's are not to be had.
    """

    def __init__(self, endpoint: Endpoint, *, processed: bool | None, needs_law: bool):
        self.endpoint, self.processed, self.needs_law = endpoint, processed, needs_law

    def load(self, policy: Any, version: int = 0) -> None:
        raise StatewiseError("an endpoint has weights of its own; they can't be loaded from here.")

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, rows: Sequence[int] | None = None
    ) -> list[Completion]:
        """One completion a prompt, in the order of the prompts; row i's seed is the stream (seed, "row", rows[i])."""
        check_law(sampling)
        names = range(len(prompts)) if rows is None else rows
        asked = [
            (prompt, derive_seed(sampling.seed, "row", int(name))) for prompt, name in zip(prompts, names, strict=True)
        ]
        plain = sampling.temperature in (0.0, 1.0) and sampling.top_p == 1 and sampling.top_k == 0
        if self.needs_law and not plain and not self.processed:
            raise self.endpoint.error(
                f"it gives log-probabilities at temperature 1 over all tokens, and a term reads those of the sampled law "
                f"(temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}); start vLLM with "
                "--logprobs-mode processed_logprobs, or sample at temperature 1"
            )
        done = self.endpoint.client.map(lambda item: self.endpoint.complete(item[0], sampling, item[1]), asked)
        known = plain or bool(self.processed)
        return done if known else [Completion(c.tokens, (math.nan,) * len(c.tokens), c.stop_reason) for c in done]


def _of_prompt(entries: Any, ids: Sequence[int]) -> tuple[list[Any], list[Mapping[int, float]]]:
    """Own log-probabilities and {id: log-probability} a token, of vLLM's `prompt_logprobs`."""
    if not isinstance(entries, list):
        raise EndpointError("its answer has no `prompt_logprobs`")
    _same_length(len(entries), len(ids))
    own: list[Any] = [None]
    tops: list[Mapping[int, float]] = [{}]
    for place, (entry, token) in enumerate(zip(entries[1:], ids[1:], strict=True), 1):
        if not isinstance(entry, dict) or str(token) not in entry:
            raise EndpointError(f"its answer has no log-probability of id {token} at token {place}: {_short(entry)}")
        top: dict[int, Any] = {
            int(name): value.get("logprob") if isinstance(value, dict) else value for name, value in entry.items()
        }
        own.append(top[token])
        tops.append(top)
    return own, tops


def _of_echo(logprobs: Any, ids: Sequence[int], named: bool) -> tuple[list[Any], list[Mapping[int, float]]]:
    """The same of the completions API's `logprobs` with `echo`; a token that was generated beside is left out."""
    if not isinstance(logprobs, dict) or not logprobs.get("token_logprobs"):
        raise EndpointError("its answer has no `logprobs` of an echoed prompt")
    size = len(ids)
    names, own = list(logprobs.get("tokens") or []), list(logprobs["token_logprobs"])
    _same_length(len(own) if len(own) != size + 1 else size, size)
    tops: list[Mapping[int, float]] = [{}] * size
    if named:
        wrong = next((i for i in range(size) if i >= len(names) or names[i] != f"{ID}{ids[i]}"), None)
        if wrong is not None:
            found = names[wrong] if wrong < len(names) else "nothing"
            raise EndpointError(f"its echo has {found!r} at token {wrong} where id {ids[wrong]} was sent")
        given = logprobs.get("top_logprobs") or [None] * size
        tops = [{int(n.removeprefix(ID)): v for n, v in (top or {}).items()} for top in given[:size]]
    return [None, *own[1:size]], tops


def _same_length(found: int, sent: int) -> None:
    if found != sent:
        raise EndpointError(f"its answer speaks of {found} tokens where {sent} were sent")


def _topk(own: list[Any], tops: Sequence[Mapping[int, float]], k: int) -> TopK:
    width = min(k, max((len(top) for top in tops), default=0))
    logprobs = np.zeros(len(own), np.float32)
    ids, values = np.full((len(own), width), -1, np.int64), np.full((len(own), width), -np.inf, np.float32)
    for place in range(1, len(own)):
        logprobs[place] = _logprob(own[place], f"token {place}")
        if k:
            best = sorted(tops[place].items(), key=lambda item: (-_logprob(item[1], f"token {place}"), item[0]))[:k]
            if len(best) < width:
                raise EndpointError(
                    f"its answer has {len(best)} log-probabilities at token {place} and {width} elsewhere"
                )
            ids[place], values[place] = [i for i, _ in best], [min(v, 0.0) for _, v in best]
    return TopK(logprobs, ids, values)


def _logprob(value: Any, where: str) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value) or value > ABOVE_ZERO:
        raise EndpointError(f"its log-probability of {where} is {value!r}; expected a number that is at most 0")
    return min(float(value), 0.0)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + " ..."


def _count(values: Any) -> str:
    return str(len(values)) if isinstance(values, list) else "no"
