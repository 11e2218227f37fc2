"""Conversations and texts as token segments: who wrote each token, and which are supervised.

Supervised are the tokens that the model has to write itself at inference, and exactly one end token after each answer:
the template's, or EOS where the template has none. What the template supplies (the generation prompt, a newline after the
end token) never is. A sequence starts with one BOS where the template writes it or the tokenizer adds it. The ids before
an answer are those of `encode_prompt`, whatever follows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal
from weakref import WeakKeyDictionary

from statewise.errors import DataError
from statewise.sources.turns import Messages, Turn, find_turns, render
from statewise.types import Author, Example, Rollout, Segment

ROLES = ("system", "developer", "user", "assistant", "tool")
Chat = bool | Literal["auto"]
SHOWN_CHARACTERS = 600  # of a sample in an error message


def encode_prompt(tokenizer: Any, prompt: str | Messages, *, chat: Chat = "auto") -> list[int]:
    """The ids that sampling starts from: the chat template with its generation prompt, or plain text.

    chat: "auto" uses the template for messages and not for text; true makes text the user's message; false is for text.
    """
    if not uses_template(chat, prompt):
        return _ids(tokenizer, str(prompt))
    return _ids(tokenizer, render(tokenizer, _as_messages(prompt, "user"), generation=True))


def encode_prompt_completion(
    tokenizer: Any, prompt: str | Messages, completion: str | Messages, *, chat: Chat = "auto"
) -> tuple[Segment, ...]:
    """The completion is supervised; in a conversation, the assistant's turns in it.

    Text: the joint tokenisation where it begins with the prompt's own ids, else prompt and completion one by one.
    """
    if uses_template(chat, prompt, completion):
        before = _as_messages(prompt, "user")
        return _conversation(tokenizer, [*before, *_as_messages(completion, "assistant")], first=len(before))
    prompt, completion = str(prompt), _without_end(str(completion), tokenizer.eos_token)
    ids, joint = _ids(tokenizer, prompt), _ids(tokenizer, prompt + completion)
    answer = joint[len(ids) :] if joint[: len(ids)] == ids else _ids(tokenizer, completion, begin=False)
    return _segments(tokenizer, [(ids, False), (_ended(tokenizer, answer), True)])


def encode_conversation(tokenizer: Any, messages: Messages) -> tuple[Segment, ...]:
    """Every turn of the assistant is supervised; system, user and tool never are."""
    return _conversation(tokenizer, list(messages), first=0)


def encode_text(tokenizer: Any, text: str) -> tuple[Segment, ...]:
    """Language modelling: all tokens but the first are supervised, one terminal EOS included."""
    ids = _ended(tokenizer, _ids(tokenizer, _without_end(text, tokenizer.eos_token)))
    return _segments(tokenizer, [(ids[:1], False), (ids[1:], True)])


def preview(tokenizer: Any, rollout: Rollout) -> str:
    """The text with what is supervised in ⟦ ⟧."""
    parts = []
    for segment in rollout.segments:
        text = tokenizer.decode(list(segment.tokens), skip_special_tokens=False)
        parts.append(f"⟦{text}⟧" if segment.train else text)
    return "".join(parts)


def uses_template(chat: Chat, *parts: str | Messages) -> bool:
    """Whether the chat template is used. Raises DataError for messages with chat = false."""
    is_text = all(isinstance(part, str) for part in parts)
    if chat is False and not is_text:
        raise DataError("received messages, expected text (chat = false); set chat = 'auto' or true")
    return not is_text if chat == "auto" else bool(chat)


@dataclass(frozen=True)
class _Marks:
    """`ends`: texts of the special tokens, longest first. `adds_bos`: the tokenizer puts BOS in front by itself."""

    ends: tuple[str, ...]
    adds_bos: bool


_MARKS: WeakKeyDictionary[Any, tuple[Any, _Marks]] = WeakKeyDictionary()


def _marks(tokenizer: Any) -> _Marks:
    key = (tokenizer.bos_token, tokenizer.eos_token, len(tokenizer))
    known = _MARKS.get(tokenizer)
    if known is None or known[0] != key:
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        ends = (special | set(tokenizer.all_special_tokens)) - ({tokenizer.bos_token} - {tokenizer.eos_token})
        first = tokenizer("a")["input_ids"][0]
        adds_bos = tokenizer.bos_token_id is not None and first == tokenizer.bos_token_id
        known = _MARKS[tokenizer] = (key, _Marks(tuple(sorted(ends, key=lambda e: (-len(e), e))), adds_bos))
    return known[1]


def _ids(tokenizer: Any, text: str, *, begin: bool = True) -> list[int]:
    """Token ids of the text; begin: with one BOS at most, and exactly one where the tokenizer adds it."""
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    bos = tokenizer.bos_token_id
    if not begin or bos is None:
        return ids
    if _marks(tokenizer).adds_bos and ids[:1] != [bos]:
        return [bos, *ids]
    while ids[:2] == [bos, bos]:
        ids.pop(0)
    return ids


def _ended(tokenizer: Any, ids: list[int]) -> list[int]:
    """With exactly one EOS at the end."""
    eos = tokenizer.eos_token_id
    if eos is None:
        raise DataError("the tokenizer has no end-of-sequence token, so no model learns to stop; set its eos_token")
    while ids and ids[-1] == eos:
        ids = ids[:-1]
    return [*ids, eos]


def _without_end(text: str, end: str | None) -> str:
    """The text without end tokens written out at its end."""
    while end and text.rstrip().endswith(end):
        text = text.rstrip().removesuffix(end)
    return text


def _as_messages(part: str | Messages, role: str) -> list[Mapping[str, Any]]:
    return [{"role": role, "content": part}] if isinstance(part, str) else list(part)


def _conversation(tokenizer: Any, messages: list[Mapping[str, Any]], first: int) -> tuple[Segment, ...]:
    """Supervise the assistant's turns from message number `first` on."""
    messages = [_message_without_end(m, tokenizer.eos_token) for m in messages]
    while True:
        whole, turns = find_turns(tokenizer, messages, first, _marks(tokenizer).ends)
        before = messages
        # Where the template's end token is not EOS, an answer that spells it out must not end twice either.
        for end in {turn.end for turn in turns}:
            messages = [_message_without_end(m, end) for m in messages]
        if messages == before:
            return _segments(tokenizer, _cut(tokenizer, whole, turns))


def _message_without_end(message: Mapping[str, Any], end: str | None) -> Mapping[str, Any]:
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, str):
        return message
    return {**message, "content": _without_end(content, end)}


def _cut(tokenizer: Any, whole: str, turns: Sequence[Turn]) -> list[tuple[list[int], bool]]:
    """Ids of the rendered text in pieces, every other one supervised, with EOS behind turns that have no end token."""
    joint = _ids(tokenizer, whole)
    bounds = _bounds(tokenizer, whole, turns, joint)
    if bounds is not None:
        pieces = [joint[a:b] for a, b in pairwise([0, *bounds, len(joint)])]
    else:  # a token spans a cut
        texts = [whole[a:b] for a, b in pairwise([0, *(c for t in turns for c in (t.start, t.stop)), len(whole)])]
        pieces = [_ids(tokenizer, text, begin=index == 0) for index, text in enumerate(texts)]
    for place, turn in enumerate(turns):
        if turn.end is None:
            pieces[2 * place + 1] = _ended(tokenizer, pieces[2 * place + 1])
    return [(piece, place % 2 == 1) for place, piece in enumerate(pieces)]


def _bounds(tokenizer: Any, whole: str, turns: Sequence[Turn], joint: list[int]) -> list[int] | None:
    """Start and stop of the turns in `joint`, the ids of `whole`; None where a token spans one."""

    def length(stop: int) -> int | None:
        ids = _ids(tokenizer, whole[:stop])
        return len(ids) if joint[: len(ids)] == ids else None

    bounds: list[int] = []
    after, edge = len(whole), len(joint)
    for turn in reversed(turns):
        # The text behind a turn is short, so that its ids are looked for first.
        rest = _ids(tokenizer, whole[turn.stop : after], begin=False)
        stop = edge - len(rest) if joint[:edge][edge - len(rest) :] == rest else length(turn.stop)
        start = length(turn.start)
        if start is None or stop is None:
            return None
        bounds = [start, stop, *bounds]
        after, edge = turn.start, start
    return bounds


def _segments(tokenizer: Any, pieces: Iterable[tuple[list[int], bool]]) -> tuple[Segment, ...]:
    """Raises DataError that shows the sample where no token is supervised."""
    authors: dict[bool, Author] = {True: "dataset", False: "prompt"}
    segments = tuple(Segment(tuple(ids), authors[train], train) for ids, train in pieces if ids)
    rollout = Rollout(segments, Example(""))
    if rollout.num_action_tokens == 0:
        raise DataError(
            "has no supervised token, so it would train nothing. Supervised text is marked ⟦so⟧; this sample is: "
            f"{preview(tokenizer, rollout)[:SHOWN_CHARACTERS]!r}"
        )
    return segments
