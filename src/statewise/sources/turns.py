"""Where the assistant's turns lie in a rendered conversation.

A turn is what the assistant has to write itself at inference: from the end of the generation prompt up to and including
its end token. Templates with `{% generation %}` blocks mark it; in others it is found by rendering the conversation's
beginnings, which needs a template that keeps earlier turns as they were.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statewise.errors import DataError

Messages = Sequence[Mapping[str, Any]]
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Turn:
    """Characters start:stop of the rendered text; `end` is the end token at their end, None where there is none."""

    start: int
    stop: int
    end: str | None


def render(tokenizer: Any, messages: Messages, *, generation: bool) -> str:
    """The conversation as text, with the generation prompt where asked. Raises DataError where the template refuses it."""
    if tokenizer.chat_template is None:
        raise DataError(
            "the tokenizer has no chat template, and the row is a conversation; name a Jinja file in model.chat_template, "
            "or give prompt and completion as text with chat = false"
        )
    try:
        return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=generation, tokenize=False))
    except Exception as error:  # a template raises what it likes, such as "roles must alternate"
        raise DataError(f"the chat template refuses the conversation: {error}") from error


def find_turns(tokenizer: Any, messages: Messages, first: int, ends: Sequence[str]) -> tuple[str, list[Turn]]:
    """The rendered conversation, and the assistant's turns in it from message number `first` on.

    ends: texts of tokens that may end a turn, longest first. Raises DataError where turns can't be told from the template.
    """
    rendered = render(tokenizer, messages, generation=False)
    whole = _as_sampled(tokenizer, messages, rendered)
    spans = _tagged(tokenizer, messages, whole, ends) if whole == rendered else None
    if spans is None:
        spans = list(_rendered(tokenizer, messages, whole, first, ends))
    return whole, [
        _closed(whole, start, stop, limit, messages[index].get("content") or "", ends)
        for index, start, stop, limit in spans
        if index >= first
    ]


def _as_sampled(tokenizer: Any, messages: Messages, whole: str) -> str:
    """The conversation with the last answer behind its own generation prompt.

    Some templates open an answer with more than they keep of it, such as an empty think block.
    """
    *before, last = messages
    content = last.get("content")
    if last["role"] != "assistant" or not before or not content:
        return whole
    prompt = render(tokenizer, before, generation=True)
    if whole.startswith(prompt):
        return whole
    shared = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(whole))
    told = whole.startswith(content, shared) and shared >= len(render(tokenizer, before, generation=False))
    return prompt + whole[shared:] if told else whole


def _assistants(messages: Messages) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def _beginning(tokenizer: Any, messages: Messages, whole: str, *, generation: bool) -> int | None:
    """Characters of `whole` that these first messages make; None where the template renders them otherwise."""
    try:
        text = render(tokenizer, messages, generation=generation)
    except DataError:
        return None
    return len(text) if whole.startswith(text) else None


def _end(tokenizer: Any, messages: Messages, index: int, whole: str, ends: Sequence[str]) -> int | None:
    """Characters of `whole` up to the end of message `index`; templates may close a conversation with one more end."""
    if index == len(messages) - 1:
        return len(whole)
    text = render(tokenizer, messages[: index + 1], generation=False)
    lengths = [len(text), *(stop for _, stop in reversed(_ends_behind(text, ends)))]
    return next((length for length in lengths if whole.startswith(text[:length])), None)


def _rendered(
    tokenizer: Any, messages: Messages, whole: str, first: int, ends: Sequence[str]
) -> Iterator[tuple[int, int, int, int]]:
    """(message, start, stop, stop) of the turns by rendering the conversation's beginnings."""
    for index in _assistants(messages):
        if index < first:
            continue
        if index == 0:
            raise DataError("messages: the first is the assistant's; expected a system or user message before it")
        start = _beginning(tokenizer, messages[:index], whole, generation=True)
        stop = _end(tokenizer, messages, index, whole, ends)
        if start is None or stop is None or stop < start:
            raise DataError(
                f"the chat template renders the conversation up to message {index} differently once more follows (as "
                "templates do that remove earlier reasoning), so the assistant's own tokens can't be told from the "
                "template's; give a template that keeps earlier turns, or one with {% generation %} blocks around what "
                "the assistant writes, in model.chat_template"
            )
        yield index, start, stop, stop


def _tagged(
    tokenizer: Any, messages: Messages, whole: str, ends: Sequence[str]
) -> list[tuple[int, int, int, int]] | None:
    """(message, start, stop, end of the message) of the turns by the template's generation blocks.

    None where they mark nothing, or not every turn.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str) or not GENERATION_TAG.search(template) or not tokenizer.is_fast:
        return None
    encoded = tokenizer.apply_chat_template(
        list(messages),
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
    )
    runs: list[list[int]] = []
    before = 0
    for (start, stop), inside in zip(encoded["offset_mapping"], encoded["assistant_masks"], strict=True):
        if inside and before:
            runs[-1][1] = stop
        elif inside:
            runs.append([start, stop])
        before = inside
    indices = _assistants(messages)
    if len(runs) != len(indices):
        return None
    spans = []
    for index, (start, stop) in zip(indices, runs, strict=True):
        prompt = _beginning(tokenizer, messages[:index], whole, generation=True) or 0
        # A block may hold a part of the generation prompt, which inference gives for free.
        limit = _end(tokenizer, messages, index, whole, ends) or stop
        spans.append((index, prompt if start < prompt <= stop else start, stop, limit))
    return spans


def _closed(whole: str, start: int, stop: int, limit: int, content: str, ends: Sequence[str]) -> Turn:
    """The turn cut behind the first end token after its content, and without what the template puts after that."""
    piece = whole[start:stop]
    found = _ends_behind(piece, ends)
    for a, b in found:
        if piece[:a].rstrip().endswith(content.rstrip()):
            return Turn(start, start + b, piece[a:b])
    if found:
        a, b = found[0]
        return Turn(start, start + b, piece[a:b])
    behind = whole[stop:limit]
    skipped = len(behind) - len(behind.lstrip())
    end = next((e for e in ends if behind.startswith(e, skipped)), None)
    if end is not None:
        return Turn(start, stop + skipped + len(end), end)
    bare = len(piece.rstrip())
    own = content[len(content.rstrip()) :]
    return Turn(start, start + bare + (len(own) if piece.startswith(own, bare) else 0), None)


def _ends_behind(text: str, ends: Sequence[str]) -> list[tuple[int, int]]:
    """(start, stop) of the end tokens that close the text, whitespace between them aside, in their order."""
    found: list[tuple[int, int]] = []
    stop = len(text.rstrip())
    while end := next((e for e in ends if text.endswith(e, 0, stop)), None):
        start = stop - len(end)
        found.insert(0, (start, stop))
        stop = len(text[:start].rstrip())
    return found
