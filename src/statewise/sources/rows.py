"""One row of data as an example and its segments, whichever of TRL's formats it has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statewise.errors import RecipeError
from statewise.sources.ids import stored_segments
from statewise.sources.reading import Row, RowError, shown
from statewise.sources.templates import (
    ROLES,
    encode_conversation,
    encode_prompt,
    encode_prompt_completion,
    encode_text,
    uses_template,
)
from statewise.types import Example, Segment

if TYPE_CHECKING:
    from statewise.sources.data import DataSource
    from statewise.sources.dataset import WrittenSource

# The formats by their fields; a row that fits several has the first that `columns` names, else the first of these.
FORMATS = (("messages",), ("prompt", "completion"), ("text",))
FIELDS = ("prompt", "completion", "messages", "text", "answer", "id", "system", "chosen", "rejected")

Message = dict[str, Any]
Part = str | list[Message]


def encode_row(source: WrittenSource, tokenizer: Any, row: Row, place: str) -> tuple[Example, tuple[Segment, ...]]:
    """The row as an example and its segments. Raises RowError that names the field.

    A row's own `input_ids` are taken where they are this tokenizer's and the source changes nothing in the text.
    """
    fields = _fields(source, row)
    stored = None if source.columns or source.remove or source.system else stored_segments(tokenizer, row)
    if stored is not None:
        return _example(fields, row, place, _asked(fields)), stored
    chosen = _format(source, fields, row)
    if chosen == ("text",):
        text = _removed(source, _part(fields["text"], "text"))
        return _example(fields, row, place), encode_text(tokenizer, _is_text(text, "text"))
    if chosen == ("messages",):
        messages = _with_system(source, fields, _messages(fields["messages"], "messages"))
        uses_template(source.chat, messages)
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=len(messages))
        return _example(fields, row, place, messages[:last]), encode_conversation(tokenizer, _removed(source, messages))
    lacking = next((name for name in chosen if name not in fields), None)
    if lacking is not None:
        raise RowError(
            f"{lacking}: is missing", f"it has {_names(row)}; columns.{lacking}=NAME takes another column for it"
        )
    before, segments = _encode_answer(source, tokenizer, fields, fields.get("completion"), "completion")
    return _example(fields, row, place, before), segments


def encode_preference(
    source: WrittenSource, tokenizer: Any, row: Row, place: str
) -> tuple[Example, tuple[tuple[Segment, ...], ...]]:
    """The row as an example, and the segments of the chosen and of the rejected completion, each behind the prompt.

    Conversations that begin with another turn than an assistant's hold the prompt themselves: it is what they share.
    """
    fields = _fields(source, row)
    chosen, rejected = (_part(fields.get(name), name) for name in ("chosen", "rejected"))
    if isinstance(chosen, list) and chosen[0]["role"] != "assistant" and not isinstance(fields.get("prompt"), list):
        fields["prompt"], chosen, rejected = _shared_prompt(chosen, rejected)
    before, first = _encode_answer(source, tokenizer, fields, chosen, "chosen")
    _, second = _encode_answer(source, tokenizer, fields, rejected, "rejected")
    if first == second:
        raise RowError("chosen, rejected: are the same tokens, so nothing is preferred")
    return _example(fields, row, place, before), (first, second)


def encode_question(source: DataSource, tokenizer: Any, row: Row, place: str) -> tuple[Example, list[int]]:
    """The row as an example with its reference answer, and the ids that sampling starts from.

    Asked is `prompt`, or `messages` up to the last answer; the reference answer is `answer`, else the row's completion.
    """
    fields = _fields(source, row)
    if "messages" in fields and "prompt" not in fields:
        turns = _messages(fields["messages"], "messages")
        answered = turns[-1]["role"] == "assistant"
        before: Part = turns[:-1] if answered else turns
        fields.setdefault("completion", turns[-1:] if answered else None)
        if not before:
            raise RowError("messages: holds an answer and no question")
    elif "prompt" in fields:
        before = _part(fields["prompt"], "prompt")
    else:
        raise RowError(
            "has neither prompt nor messages, so there is nothing to ask; name the field in source.columns, such as "
            '{ prompt = "question" }',
            f"it has {_names(row)}",
        )
    if uses_template(source.chat, before):
        before = _with_system(source, fields, _as_user(before))
    fields.setdefault("answer", _written(fields.get("completion")))
    return _example(fields, row, place, before), encode_prompt(tokenizer, before, chat=source.chat)


def written_answer(source: DataSource, row: Row) -> str | None:
    """The text of the answer that a row holds: its completion, the last turn of its conversation, else `answer`."""
    fields = _fields(source, row)
    turns = fields.get("messages")
    if "completion" not in fields and "prompt" not in fields and isinstance(turns, list) and turns:
        fields["completion"] = turns[-1:] if turns[-1].get("role") == "assistant" else None
    text = _written(fields.get("completion"))
    answer = fields.get("answer")
    return text if text is not None or answer is None else str(answer)


def _asked(fields: Mapping[str, Any]) -> Part | None:
    """The prompt of a row whose ids are given."""
    if "prompt" in fields:
        return _part(fields["prompt"], "prompt")
    return _messages(fields["messages"], "messages")[:-1] or None if "messages" in fields else None


def _written(completion: Any) -> str | None:
    """The text of a completion; None where it is none."""
    if isinstance(completion, list) and completion and isinstance(completion[-1], Mapping):
        completion = completion[-1].get("content")
    return completion if isinstance(completion, str) else None


def _shared_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """The messages that both conversations begin with, and the rest of each."""
    size = min(len(chosen), len(rejected))
    shared = next((i for i in range(size) if chosen[i] != rejected[i]), size)
    rests = chosen[shared:], rejected[shared:]
    if not shared or not all(rest and rest[0]["role"] == "assistant" for rest in rests):
        raise RowError(
            "chosen, rejected: expected conversations with the same beginning, after which the assistant's turns differ; "
            "or give the prompt in a field of its own"
        )
    return chosen[:shared], *rests


def _encode_answer(
    source: WrittenSource, tokenizer: Any, fields: Mapping[str, Any], completion: Any, name: str
) -> tuple[Part, tuple[Segment, ...]]:
    """The prompt as it is shown, and the segments of prompt and completion."""
    before, after = _part(fields.get("prompt"), "prompt"), _part(completion, name)
    after = _part(_removed(source, after), name)
    if uses_template(source.chat, before, after):
        before = _with_system(source, fields, _as_user(before))
    elif source.system is not None or "system" in source.columns:
        raise RecipeError("source.system: plain text has no system message; set source.chat = true, or leave it away.")
    return before, encode_prompt_completion(tokenizer, before, after, chat=source.chat)


def _fields(source: DataSource, row: Row) -> dict[str, Any]:
    """{our name: value} of what the row has; the answer of a multiple choice is its completion."""
    for ours, theirs in source.columns.items():
        if theirs not in row:
            raise RowError(
                f"{theirs}: is missing (source.columns names it for {ours})",
                f"it has {_names(row)}; source.columns={{}} takes columns by their own names",
            )
    fields = {name: row.get(source.columns.get(name, name)) for name in FIELDS}
    choices, answer = row.get("choices"), fields["answer"]
    if fields["completion"] is None and isinstance(choices, list) and isinstance(answer, int):
        if not 0 <= answer < len(choices):
            raise RowError("answer: is no index of choices", f"received {answer} for {len(choices)} choices")
        fields["completion"] = choices[answer]
        if isinstance(fields["prompt"], list):
            fields["completion"] = [{"role": "assistant", "content": choices[answer]}]
    return {name: value for name, value in fields.items() if value is not None}


def _format(source: DataSource, fields: Mapping[str, Any], row: Row) -> tuple[str, ...]:
    for present in (source.columns, fields):
        for names in FORMATS:
            if any(name in present for name in names):
                return names
    raise RowError(
        "has none of the fields messages, prompt + completion, text, input_ids; name them in source.columns, such as "
        '{ prompt = "question", completion = "answer" }',
        f"it has {_names(row)}",
    )


def _names(row: Row) -> str:
    return ", ".join(map(str, row)) or "no fields"


def _example(fields: Mapping[str, Any], row: Row, place: str, prompt: Part | None = None) -> Example:
    name = fields.get("id", Path(place).name)
    if not isinstance(name, str | int):
        raise RowError("id: expected a text or an integer", f"received {shown(name)}")
    messages = tuple(prompt) if isinstance(prompt, list) else ()
    text = prompt if isinstance(prompt, str) else None
    return Example(str(name), messages, text, fields.get("answer"), row)


def _part(value: Any, name: str) -> Part:
    if not isinstance(value, str):
        return _messages(value, name)
    if not value.strip():
        raise RowError(f"{name}: is empty")
    return value


def _is_text(value: Part, name: str) -> str:
    if isinstance(value, str):
        return value
    raise RowError(f"{name}: expected text", f"received {shown(value)}")


def _messages(value: Any, name: str) -> list[Message]:
    if value is None:
        raise RowError(f"{name}: is missing")
    if not isinstance(value, list):
        kinds = "a list of messages" if name == "messages" else "text or a list of messages"
        raise RowError(f"{name}: expected {kinds}", f"received {shown(value)}")
    if not value:
        raise RowError(f"{name}: is empty")
    return [_message(message, name, index) for index, message in enumerate(value)]


def _message(value: Any, name: str, index: int) -> Message:
    """A message without the keys that files fill with null."""
    where = f"message {index} is {shown(value)}"
    if not isinstance(value, Mapping):
        raise RowError(f"{name}: expected messages {{'role': ..., 'content': text}}", where)
    message = {key: part for key, part in value.items() if part is not None}
    if message.get("role") not in ROLES:
        raise RowError(f"{name}: unknown role, expected one of {', '.join(ROLES)}", where)
    content = message.get("content", "" if message.get("tool_calls") else None)
    if not isinstance(content, str):
        raise RowError(f"{name}: content is no text", where)
    if message["role"] == "assistant" and not content.strip() and not message.get("tool_calls"):
        raise RowError(f"{name}: an assistant's content is empty", where)
    return {**message, "content": content}


def _as_user(part: Part) -> list[Message]:
    return [{"role": "user", "content": part}] if isinstance(part, str) else part


def _removed(source: WrittenSource, part: Any) -> Any:
    """The part without what `remove` names, in the assistant's messages where it has messages."""
    for pattern in source.remove:
        if isinstance(part, str):
            part = re.sub(pattern, "", part)
        else:
            part = [
                {**m, "content": re.sub(pattern, "", m["content"])} if m["role"] == "assistant" else m for m in part
            ]
    return part


def _with_system(source: DataSource, fields: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    system = fields.get("system", source.system)
    if system is None or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": _is_text(system, "system")}, *messages]
