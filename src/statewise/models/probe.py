"""What a server can do, found out before anything depends on it: its model, its tokens, what log-probabilities it gives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from statewise.errors import EndpointError, nearest
from statewise.models.endpoint import Asking, Endpoint
from statewise.models.http import Client, Refused
from statewise.types import Sampling

# Digits, accents, scripts, an emoji, code and white space: where tokenizers differ.
TEXT = "Natalia sold 48 clips in “May”, ½ as many: naïve 東京 🙂.\n\tdef f(x):\n        return x**2 - 3.14e-5"
SPECIAL, SCORED = 16, 64  # special tokens in the probe text, and tokens of it that are scored
# From what vLLM understands to what the oldest servers do.
WAYS = (Asking(), *(Asking("echo", max_tokens, named) for named in (True, False) for max_tokens in (0, 1)))
LOUD = Sampling(8, temperature=2.0)  # likely and unlikely tokens, so that temperature 1 and 2 tell apart
SAME = 0.02  # nats, mean: two log-probabilities of one law, and not of two


@dataclass(frozen=True)
class Wanted:
    """What a recipe needs of an endpoint. top_k: tokens a place, None where no distribution is read."""

    scores: bool = True
    top_k: int | None = None
    generates: bool = False


@dataclass(frozen=True)
class Probed:
    """The endpoint as it must be asked, and `facts` for people: plain values.

    processed: see `EndpointSampler`. marks: log-probabilities of the probe text, by which a change of weights shows.
    """

    endpoint: Endpoint
    processed: bool | None = None
    marks: tuple[float, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


def probe(client: Client, model: str | None, tokenizer: Any, num_tokens: int, wanted: Wanted) -> Probed:
    """Raises EndpointError that names what the server lacks and how to mend it.

    tokenizer, num_tokens: the policy's, padding included.
    """
    started = time.perf_counter()
    name, context = _model(client, model)
    endpoint = Endpoint(client, name, num_tokens=num_tokens, context=context)
    text = TEXT + "".join(tokenizer.all_special_tokens[:SPECIAL])
    ids = tokenizer.encode(text, add_special_tokens=False)
    facts: dict[str, Any] = {
        "model": name,
        "context": context,
        "tokens_checked_by": _same_tokens(endpoint, text, ids, tokenizer),
    }
    ids = ids[:SCORED]
    marks: tuple[float, ...] = ()
    if wanted.scores:
        endpoint.asking, marks, size = _asking(endpoint, ids, wanted.top_k or 0)
        endpoint.num_tokens = min(num_tokens, size) if (wanted.top_k or 0) >= num_tokens else num_tokens
        facts |= {"prompt_logprobs_by": endpoint.asking.field, "top_k": wanted.top_k or 0}
    processed: bool | None = None
    if wanted.generates:
        processed = _processed(endpoint, ids)
        facts |= {
            "token_ids": True,
            "logprobs_of": {True: "the law", False: "temperature 1", None: "unknown"}[processed],
        }
    return Probed(endpoint, processed, marks, {**facts, "seconds": round(time.perf_counter() - started, 3)})


def _model(client: Client, wanted: str | None) -> tuple[str, int | None]:
    """The model's name at the server, and the longest sequence that it takes."""
    entries: Sequence[Any] = ()
    try:
        answer = client.get("/models")
        entries = [e for e in answer.get("data", []) if isinstance(e, dict)] if isinstance(answer, dict) else []
    except Refused as refused:
        if refused.status in (401, 403):
            raise EndpointError(
                f"{refused} Name the environment variable that holds a valid key in the teacher's api_key_env."
            ) from None
        if refused.status not in (404, 405, 501):
            raise
    known = {str(e.get("id")): e.get("max_model_len") for e in entries}
    bases = [str(e.get("id")) for e in entries if e.get("parent") is None]  # an adapter's parent is its base
    if wanted is None and len(bases) == 1:
        wanted = bases[0]
    if wanted is None:
        raise EndpointError(
            f"endpoint {client.url}: serves {', '.join(sorted(known)) or 'models that it does not list'}; name one in the "
            "teacher's `model`. (The address ends in /v1 on most servers.)"
        )
    if known and wanted not in known:
        raise EndpointError(f"endpoint {client.url}: has no model '{wanted}'{nearest(wanted, known)}.")
    context = known.get(wanted)
    return wanted, context if isinstance(context, int) else None


def _same_tokens(endpoint: Endpoint, text: str, ids: Sequence[int], tokenizer: Any) -> str:
    """How it was seen that the server splits text as the policy does. Raises EndpointError where it doesn't."""
    for how, ask in (("prompt_token_ids", _ids_of_completion), ("tokenize", _ids_of_tokenize)):
        found = ask(endpoint, text)
        if found is not None:
            _compare(endpoint, [int(i) for i in found], ids, tokenizer)
            return how
    texts = _texts_of_echo(endpoint, text)
    if texts is None:
        raise endpoint.error(
            "it does not say how it splits text, so its ids may mean other tokens; expected `prompt_token_ids` for "
            "return_token_ids (vLLM from 0.10.2 on), an answer of /tokenize, or the tokens of an echo"
        )
    own = [tokenizer.decode([i]) for i in ids]
    # A part of a character is written in many ways.
    same = len(texts) == len(own) and all(
        a == b or not a.isascii() or not b.isascii() for a, b in zip(texts, own, strict=True)
    )
    if not same:
        raise _another(
            endpoint, f"it splits the probe text into {len(texts)} tokens: {texts[:6]}, the policy into {own[:6]}"
        )
    return "echo"


def _ids_of_completion(endpoint: Endpoint, text: str) -> list[int] | None:
    extras = {"return_token_ids": True, "add_special_tokens": False}
    with suppress(Refused):
        return endpoint.choice({"prompt": text, "max_tokens": 1, "temperature": 0.0, **extras}).get("prompt_token_ids")
    return None


def _ids_of_tokenize(endpoint: Endpoint, text: str) -> list[int] | None:
    with suppress(Refused):
        body = {"model": endpoint.model, "prompt": text, "add_special_tokens": False}
        answer = endpoint.client.post("//tokenize", body)
        return answer.get("tokens") if isinstance(answer, dict) else None
    return None


def _texts_of_echo(endpoint: Endpoint, text: str) -> list[str] | None:
    for max_tokens in (0, 1):
        with suppress(Refused, EndpointError):
            body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0.0, "echo": True, "logprobs": 1}
            names = (endpoint.choice(body).get("logprobs") or {}).get("tokens")
            if names:
                return [str(n) for n in names[: len(names) - max_tokens]]
    return None


def _compare(endpoint: Endpoint, found: list[int], ids: Sequence[int], tokenizer: Any) -> None:
    if found == list(ids):
        return
    if len(found) > len(ids) and found[len(found) - len(ids) :] == list(ids):
        return  # a first token that the server always adds; ids are sent here
    place = next((i for i, (a, b) in enumerate(zip(found, ids, strict=False)) if a != b), min(len(found), len(ids)))
    theirs = found[place] if place < len(found) else "nothing"
    ours = ids[place] if place < len(ids) else None
    word = "nothing" if ours is None else f"id {ours} {tokenizer.decode([ours])!r}"
    raise _another(endpoint, f"at token {place} of the probe text it has id {theirs} and the policy {word}")


def _another(endpoint: Endpoint, where: str) -> EndpointError:
    return endpoint.error(
        f"has another tokenizer than the policy: {where}. Its probabilities speak of other tokens. Serve a model with the "
        "policy's tokenizer (padding of the vocabulary may differ), or distil through text: source = 'dataset' with its "
        "answers"
    )


def _asking(endpoint: Endpoint, ids: Sequence[int], k: int) -> tuple[Asking, tuple[float, ...], int]:
    """The first way of asking that gives what is needed, the log-probabilities of the ids, and the size of the vocabulary
    where all of it was given."""
    problems = []
    for way in WAYS:
        if k and not way.named:
            continue
        try:
            found = endpoint.topk(ids, k, way)
        except EndpointError as error:
            problems.append((way, error))
            continue
        if found.ids.shape[1] < min(k, endpoint.num_tokens) and k < endpoint.num_tokens:
            problems.append(
                (way, endpoint.error(f"it gives {found.ids.shape[1]} tokens a place where {k} were asked for"))
            )
            continue
        return way, tuple(found.logprobs[1:].tolist()), int(found.ids.max(initial=-1)) + 1
    raise _no_scores(endpoint, ids, k, problems)


def _no_scores(
    endpoint: Endpoint, ids: Sequence[int], k: int, problems: list[tuple[Asking, EndpointError]]
) -> EndpointError:
    few = 0
    if k:
        with suppress(EndpointError):
            endpoint.topk(ids, 0, WAYS[0])
            few = 1
    first = problems[0][1]
    if few:
        size = endpoint.num_tokens if k >= endpoint.num_tokens else k
        return endpoint.error(
            f"it gives prompt log-probabilities, but not of {size} tokens a place ({first}) Lower the loss's top_k (vLLM's "
            f"default limit is 20), or start the server with --max-logprobs {'-1' if k >= endpoint.num_tokens else k}"
        )
    return endpoint.error(
        f"it gives no prompt log-probabilities: {first} Expected vLLM's `prompt_logprobs`, or `echo` with `logprobs` of the "
        "completions API. Take a vLLM server, or use the teacher's text alone: source = 'teacher' or 'continuation'"
    )


def _processed(endpoint: Endpoint, ids: Sequence[int]) -> bool | None:
    """Whether a completion's log-probabilities follow its temperature; None where nothing tells."""
    drawn = endpoint.complete(ids, LOUD, 1)
    asking = endpoint.asking
    if asking is None:
        with suppress(EndpointError):
            asking, *_ = _asking(endpoint, ids, 0)
    if asking is None:
        return None
    plain = endpoint.topk([*ids, *drawn.tokens], 0, asking).logprobs[len(ids) :]
    return not sum(abs(a - b) for a, b in zip(drawn.logprobs, plain, strict=True)) <= SAME * len(drawn.tokens)
