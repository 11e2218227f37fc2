"""Hints: how the imitator of Hinted Decoding is shown the answer. A hint is a TOML file.

    [[messages]]           a conversation (role, content), for prompts that are conversations; or
    text = "..."           plain text, for prompts that are plain text
    delimiter = "</think>" where reasoning ends; without it the data decide
    [finish]               {delimiter: the sentence that {finish} stands for}
    [analysis]             opening, heading, max_tokens: the model first writes from `opening` to `heading`, and that is part
                           of its context

Placeholders: {question}, {answer}, {finish}, {opening}, {heading}, and in `text` {prompt}, the plain stream's own context.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from statewise.component import build
from statewise.errors import DataError, RecipeError, nearest
from statewise.sources.templates import encode_prompt

if TYPE_CHECKING:
    from statewise.types import Example

SHIPPED = Path(__file__).parents[1] / "hints"
PLACEHOLDER = re.compile(r"\{(question|answer|finish|opening|heading|prompt)\}")
THINK_END = "</think>"
# What golds may mark their answer with; the first that stands in at least half of them is the delimiter.
ANSWER_MARKS = ("\\boxed{", "####")

Message = Mapping[str, Any]


class HintMessage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    role: str = Field(pattern="^(system|user|assistant)$")
    content: str


class Analysis(BaseModel):
    """The first stage: the assistant's turn begins with `opening`; it ends behind the first line that is `heading`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    opening: str = ""
    heading: str = Field(min_length=1)
    max_tokens: int = Field(1024, ge=1)


class Hint(BaseModel):
    """A hint file's content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    messages: tuple[HintMessage, ...] = ()
    text: str | None = None
    delimiter: str | None = None
    finish: dict[str, str] = {}
    analysis: Analysis | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Hint:
        if bool(self.messages) == (self.text is not None):
            raise RecipeError("expected either messages or text")
        if self.messages and self.messages[-1].role != "user":
            raise RecipeError("the last message is answered, so that its role must be user")
        shown = self.text or "".join(m.content for m in self.messages)
        if "{answer}" not in shown:
            raise RecipeError("{answer} stands nowhere, so the imitator would know no more than the plain stream")
        if "{prompt}" in shown and self.messages:
            raise RecipeError("{prompt} is for hints with `text`; a conversation asks {question}")
        return self

    def encode(self, tokenizer: Any, example: Example, answer: str, delimiter: str | None) -> list[int]:
        """The ids of the imitator's context (without an analysis). Raises DataError where hint and prompt are of two forms."""
        if bool(self.messages) != bool(example.messages):
            raise DataError(
                f"sample '{example.id}': is {'a conversation' if example.messages else 'plain text'}, and the hint is for "
                f"{'conversations' if self.messages else 'plain text'}; choose another hint, or set source.chat."
            )
        values = {"question": question_of(example), "answer": answer, "finish": self.finish.get(delimiter or "", "")}
        if self.analysis is not None:
            values |= {"opening": self.analysis.opening, "heading": self.analysis.heading}
        if self.text is not None:
            return encode_prompt(tokenizer, filled(self.text, values | {"prompt": example.text or ""}), chat=False)
        messages = [{"role": m.role, "content": filled(m.content, values).strip()} for m in self.messages]
        return _encode_messages(tokenizer, _with_system_of(example, messages))

    def opened_by(self, tokenizer: Any) -> list[int]:
        """Ids of the text that the assistant's turn is made to begin with."""
        opening = self.analysis.opening if self.analysis else ""
        return list(tokenizer(opening, add_special_tokens=False)["input_ids"]) if opening else []


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with each placeholder's value; what a value holds is not looked at again."""
    return PLACEHOLDER.sub(lambda found: values.get(found[1], ""), text)


def question_of(example: Example) -> str:
    """What is asked: the only user message, or the whole conversation but its system message."""
    if not example.messages:
        return example.text or ""
    turns = [m for m in example.messages if m["role"] not in ("system", "developer")]
    if len(turns) == 1:
        return str(turns[0]["content"])
    return "\n\n".join(f"{m['role']}: {m['content']}" for m in turns)


def _with_system_of(example: Example, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The hint's messages, with the prompt's own system message in front of the hint's."""
    first = example.messages[0]
    if first["role"] not in ("system", "developer"):
        return messages
    own = str(first["content"])
    if messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{own}\n\n{messages[0]['content']}"}, *messages[1:]]
    return [{"role": "system", "content": own}, *messages]


def _encode_messages(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    try:
        return encode_prompt(tokenizer, messages)
    except DataError:
        if messages[0]["role"] != "system" or tokenizer.chat_template is None:
            raise
    # Some templates refuse system messages; the first user message takes it then.
    system, user, *rest = messages
    return encode_prompt(tokenizer, [{**user, "content": f"{system['content']}\n\n{user['content']}"}, *rest])


def shipped_hints() -> dict[str, Path]:
    """The hints that come with the package, by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}


def load_hint(name: str, base_dir: Path = Path(".")) -> Hint:
    """A hint by the name of a shipped one, or by its file. Raises RecipeError that names file and field."""
    shipped = shipped_hints()
    file = base_dir / name if (base_dir / name).is_file() else Path(name)
    if not file.is_file():
        if name not in shipped:
            raise RecipeError(f"hint '{name}': neither a file nor a shipped hint{nearest(name, shipped)}")
        file = shipped[name]
    try:
        plain = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{file}: is not valid TOML: {error}") from None
    hint: Hint = build(Hint, plain, f"hint {file.name}")
    return hint


def choose_hint(tokenizer: Any, example: Example) -> str:
    """ "base" for plain text; for conversations "thinking" where the tokenizer has `</think>`, else "instruct"."""
    if not example.messages:
        return "base"
    return "thinking" if THINK_END in tokenizer.get_added_vocab() else "instruct"


def choose_delimiter(hint: Hint, answers: Sequence[str]) -> str | None:
    """The hint's own, else the answer mark that stands in at least half of the answers; None where there is none."""
    if hint.delimiter is not None:
        return hint.delimiter
    return next((m for m in ANSWER_MARKS if 2 * sum(m in a for a in answers) >= max(1, len(answers))), None)
