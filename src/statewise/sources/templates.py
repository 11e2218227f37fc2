"""Conversations and texts as token segments: who wrote each token, and which are supervised.

Supervised are the tokens that the model has to write itself at inference: an assistant turn up to and including exactly
one terminal end token. What the template supplies (the generation prompt, a newline after the end token) never is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from statewise.errors import DataError
from statewise.types import Rollout, Segment

Messages = Sequence[Mapping[str, Any]]
ROLES = ("system", "developer", "user", "assistant", "tool")


def encode_prompt(tokenizer: Any, prompt: str | Messages, *, chat: bool) -> list[int]:
    """The ids that sampling starts from: the chat template with its generation prompt, or the text with at most one BOS."""
    if not chat:
        if not isinstance(prompt, str):
            raise DataError("prompt: received messages, expected text (chat = false); set chat = true or 'auto'.")
        return _text_ids(tokenizer, prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return _render(tokenizer, messages, generation=True)


def encode_conversation(tokenizer: Any, messages: Messages) -> tuple[Segment, ...]:
    """Every assistant turn is supervised."""
    return _conversation(tokenizer, list(messages), first=0)


def encode_prompt_completion(
    tokenizer: Any, prompt: str | Messages, completion: str | Messages, *, chat: bool
) -> tuple[Segment, ...]:
    """The completion is supervised. Text: the prompt's ids are those of `encode_prompt`, whatever follows them."""
    if chat:
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        after = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
        return _conversation(tokenizer, [*before, *after], first=len(before))
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise DataError(
            "prompt, completion: received messages, expected text (chat = false); set chat = true or 'auto'."
        )
    ids = _text_ids(tokenizer, prompt)
    return _segments(ids + _ended(tokenizer, _plain_ids(tokenizer, completion)), range(len(ids), 1 << 60))


def encode_text(tokenizer: Any, text: str) -> tuple[Segment, ...]:
    """Language modelling: all tokens but BOS are supervised, and one terminal EOS."""
    ids = _text_ids(tokenizer, text)
    start = int(bool(ids) and ids[0] == tokenizer.bos_token_id)
    return _segments(_ended(tokenizer, ids), range(start, 1 << 60))


def preview(tokenizer: Any, rollout: Rollout) -> str:
    """The text with supervised spans in ⟦ ⟧."""
    parts = []
    for segment in rollout.segments:
        text = tokenizer.decode(list(segment.tokens), skip_special_tokens=False)
        parts.append(f"⟦{text}⟧" if segment.train else text)
    return "".join(parts)


def _text_ids(tokenizer: Any, text: str) -> list[int]:
    """With the special tokens the tokenizer puts in front, one BOS at most, and no EOS."""
    ids = list(tokenizer(text)["input_ids"])
    while ids and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    bos = tokenizer.bos_token_id
    while bos is not None and ids[:2] == [bos, bos]:
        ids.pop(0)
    return ids


def _plain_ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _ended(tokenizer: Any, ids: list[int]) -> list[int]:
    """With exactly one EOS at the end."""
    eos = _eos(tokenizer)
    while ids and ids[-1] == eos:
        ids = ids[:-1]
    return [*ids, eos]


def _eos(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end-of-sequence token, so a model could not learn to stop; set eos_token in it."
        )
    return int(tokenizer.eos_token_id)


def _render(tokenizer: Any, messages: Messages, *, generation: bool) -> list[int]:
    if tokenizer.chat_template is None:
        raise DataError(
            "the tokenizer has no chat template, and the row is a conversation; name a Jinja file in model.chat_template, "
            "or give prompt and completion as text with chat = false."
        )
    try:
        ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=generation, return_dict=False)
    except Exception as error:  # a Jinja error of the template itself, such as "roles must alternate"
        raise DataError(f"the chat template refuses the conversation: {error}") from error
    bos = tokenizer.bos_token_id
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return list(ids)


def _conversation(tokenizer: Any, messages: list[Mapping[str, Any]], first: int) -> tuple[Segment, ...]:
    """Supervise the assistant turns from message number `first` on."""
    messages = [_without_end_text(tokenizer, m) for m in messages]
    ids = _render(tokenizer, messages, generation=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index < first:
            continue
        start = len(_prefix(tokenizer, messages[:index], ids, generation=True))
        stop = (
            len(ids)
            if index == len(messages) - 1
            else len(_prefix(tokenizer, messages[: index + 1], ids, generation=False))
        )
        spans.append((start, _end_of_turn(tokenizer, ids, start, stop)))
    if spans and spans[-1][1] is None:
        ids = ids[: _last_word(tokenizer, ids)]
        ids.append(_eos(tokenizer))
        spans[-1] = (spans[-1][0], len(ids))
    supervised = {i for start, stop in spans for i in range(start, stop or start)}
    return _segments(ids, supervised)


def _prefix(tokenizer: Any, messages: list[Mapping[str, Any]], whole: list[int], *, generation: bool) -> list[int]:
    """The rendered beginning of the conversation; it must be the beginning of the rendered whole."""
    if not messages:
        raise DataError("messages: the first is an assistant's; expected a user or system message before it.")
    ids = _render(tokenizer, messages, generation=generation)
    if whole[: len(ids)] == ids:
        return ids
    if generation:  # a generation prompt that opens more than a past turn has, such as an empty think block
        shared = next(
            (i for i, (a, b) in enumerate(zip(ids, whole, strict=False)) if a != b), min(len(ids), len(whole))
        )
        if shared >= len(_render(tokenizer, messages, generation=False)):
            return ids[:shared]
    raise DataError(
        "the chat template renders a conversation's beginning differently once more turns follow, so the assistant's own "
        "tokens can't be told from the template's; give a template that keeps earlier turns in model.chat_template."
    )


def _end_of_turn(tokenizer: Any, ids: list[int], start: int, stop: int) -> int | None:
    """One past the turn's end token, None where the template writes none."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for index in range(stop - 1, start - 1, -1):
        if ids[index] in special:
            return index + 1 if not tokenizer.decode(ids[index + 1 : stop]).strip() else None
    return None


def _last_word(tokenizer: Any, ids: list[int]) -> int:
    """Length without trailing whitespace tokens."""
    size = len(ids)
    while size and not tokenizer.decode([ids[size - 1]]).strip():
        size -= 1
    return size


def _without_end_text(tokenizer: Any, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """An assistant's message without an end token written out as text: the template adds its own."""
    content, end = message.get("content"), tokenizer.eos_token
    if message["role"] != "assistant" or not isinstance(content, str) or not end or not content.endswith(end):
        return message
    return {**message, "content": content.removesuffix(end)}


def _segments(ids: list[int], supervised: Any) -> tuple[Segment, ...]:
    """Runs of supervised and other tokens."""
    runs: list[tuple[list[int], bool]] = []
    for index, token in enumerate(ids):
        train = index in supervised
        if not runs or runs[-1][1] != train:
            runs.append(([], train))
        runs[-1][0].append(token)
    return tuple(Segment(tuple(tokens), "dataset" if train else "prompt", train) for tokens, train in runs)
