"""One row of data as an example and its segments, whichever of TRL's formats it has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statewise.errors import DataError
from statewise.sources.templates import ROLES, encode_conversation, encode_prompt_completion, encode_text
from statewise.types import Example, Segment

if TYPE_CHECKING:
    from statewise.sources.data import DataSource
    from statewise.sources.dataset import WrittenSource


def _value(source: DataSource, row: Mapping[str, Any], name: str) -> Any:
    return row.get(source.columns.get(name, name))


def example_of(source: DataSource, row: Mapping[str, Any], place: str) -> Example:
    """The row's id, what is shown of it, its reference answer, and the row itself."""
    own = _value(source, row, "id")
    prompt, messages, text = (_value(source, row, n) for n in ("prompt", "messages", "text"))
    shown = messages if isinstance(messages, list) else prompt if isinstance(prompt, list) else []
    # Without an id of its own a row is known by its content and place, so that the same file gives the same ids.
    name = (
        str(own) if own is not None else f"{Path(place).name}#{blake2b(repr(row).encode(), digest_size=4).hexdigest()}"
    )
    answer = _value(source, row, "answer")
    plain = text if isinstance(text, str) else prompt if isinstance(prompt, str) else None
    return Example(name, tuple(shown), plain, answer, dict(row))


def encode_row(source: WrittenSource, tokenizer: Any, row: Mapping[str, Any]) -> tuple[Segment, ...]:
    """The segments of a row, whichever of the formats it has."""
    messages, prompt, completion, text = (_value(source, row, n) for n in ("messages", "prompt", "completion", "text"))
    if messages is not None:
        return encode_conversation(tokenizer, _with_system(source, _messages(messages, "messages")))
    if prompt is not None or completion is not None:
        return _encode_answer(source, tokenizer, prompt, completion)
    if isinstance(text, str) and text.strip():
        return encode_text(tokenizer, text)
    if text is not None:
        raise DataError(f"text: received {text!r}, expected a text that is not empty")
    raise DataError(
        f"has none of the fields messages, prompt + completion, text (it has: {', '.join(map(str, row))}); name them in "
        'source.columns, such as { prompt = "question", completion = "answer" }'
    )


def encode_preference(source: WrittenSource, tokenizer: Any, row: Mapping[str, Any]) -> tuple[tuple[Segment, ...], ...]:
    """The segments of the chosen and of the rejected completion, each behind the prompt.

    Conversations that begin with another turn than an assistant's hold the prompt themselves: it is what they share.
    """
    prompt, chosen, rejected = (_value(source, row, n) for n in ("prompt", "chosen", "rejected"))
    if chosen is None or rejected is None:
        raise DataError(
            f"has not both chosen and rejected (it has: {', '.join(map(str, row))}); name them in source.columns, such as "
            '{ chosen = "better", rejected = "worse" }'
        )
    chosen, rejected = _part(chosen, "chosen"), _part(rejected, "rejected")
    if not isinstance(chosen, str) and chosen[0]["role"] != "assistant" and not isinstance(prompt, list):
        prompt, chosen, rejected = _shared_prompt(chosen, rejected)
    both = tuple(_encode_answer(source, tokenizer, prompt, answer) for answer in (chosen, rejected))
    if both[0] == both[1]:
        raise DataError("chosen, rejected: are the same tokens, so nothing is preferred")
    return both


def _shared_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """The messages that both conversations begin with, and the rest of each."""
    size = min(len(chosen), len(rejected))
    shared = next((i for i in range(size) if chosen[i] != rejected[i]), size)
    rests = chosen[shared:], rejected[shared:]
    if not shared or not all(rest and rest[0]["role"] == "assistant" for rest in rests):
        raise DataError(
            "chosen, rejected: expected conversations with the same beginning, after which the assistant's turns differ; "
            "or give the prompt in a field of its own"
        )
    return chosen[:shared], *rests


def prompt_of(source: DataSource, row: Mapping[str, Any]) -> tuple[str | list[Mapping[str, Any]], bool]:
    """What a model is asked, text or messages without the last answer, and whether through the chat template."""
    messages, prompt = _value(source, row, "messages"), _value(source, row, "prompt")
    if messages is None and prompt is None:
        raise DataError(
            f"has neither prompt nor messages, so there is nothing to ask (it has: {', '.join(map(str, row))}); name the "
            'field in source.columns, such as { prompt = "question" }'
        )
    before = _part(prompt, "prompt") if messages is None else _without_answer(_messages(messages, "messages"))
    chat = source.chat if isinstance(source.chat, bool) else not isinstance(before, str)
    if chat:
        before = _with_system(source, [{"role": "user", "content": before}] if isinstance(before, str) else before)
    return before, chat


def answer_of(source: DataSource, row: Mapping[str, Any]) -> str | None:
    """The text that the row holds as the completion of its prompt, None where it has none."""
    messages, completion = _value(source, row, "messages"), _value(source, row, "completion")
    if isinstance(completion, str):
        return completion
    last = completion if isinstance(completion, list) else messages
    answered = isinstance(last, list) and last and last[-1].get("role") == "assistant"
    return str(last[-1]["content"]) if answered else None


def _without_answer(messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    kept = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if not kept:
        raise DataError("messages: holds an answer and no question")
    return kept


def _encode_answer(source: WrittenSource, tokenizer: Any, prompt: Any, completion: Any) -> tuple[Segment, ...]:
    before, after = _part(prompt, "prompt"), _part(completion, "completion")
    for pattern in source.remove:
        if isinstance(after, str):
            after = re.sub(pattern, "", after)
        else:
            after = [{**m, "content": re.sub(pattern, "", m["content"])} for m in after]
    chat = source.chat if isinstance(source.chat, bool) else not (isinstance(before, str) and isinstance(after, str))
    if chat:
        before = _with_system(source, [{"role": "user", "content": before}] if isinstance(before, str) else before)
    return encode_prompt_completion(tokenizer, before, after, chat=chat)


def _part(value: Any, name: str) -> str | list[Mapping[str, Any]]:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{name}: is empty")
        return value
    return _messages(value, name)


def _messages(value: Any, name: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not value:
        expected = "text or a list of messages" if name != "messages" else "a list of messages"
        raise DataError(f"{name}: received {value!r}, expected {expected}")
    for index, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise DataError(f"{name}[{index}]: received {message!r}, expected {{'role': ..., 'content': text}}")
        if message.get("role") not in ROLES:
            raise DataError(
                f"{name}[{index}].role: received {message.get('role')!r}, expected one of {', '.join(ROLES)}"
            )
    return value


def _with_system(source: DataSource, messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if source.system is None or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": source.system}, *messages]
