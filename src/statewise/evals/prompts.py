"""From a row to token ids: templates, chat and system messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from statewise.errors import DataError, RecipeError, nearest
from statewise.evals.rows import Row, RowsTask

Prompt = str | list[dict[str, str]]


class PromptedTask(RowsTask):
    """Asks a model something.

    chat: through the tokenizer's chat template ("auto": where it has one).
    template: what is asked, with columns of the row in braces; by default the column `prompt`, which may hold messages.
    system: a system message, or text before the prompt where not asked in chat.
    """

    plain_template: ClassVar[str] = "{prompt}"  # of models that are not asked in chat

    chat: bool | Literal["auto"] = "auto"
    template: str | None = None
    system: str | None = None

    def in_chat(self, tokenizer: Any) -> bool:
        """Whether prompts go through the chat template."""
        has_template = getattr(tokenizer, "chat_template", None) is not None
        if self.chat is True and not has_template:
            raise RecipeError(f"task '{self.kind}': chat = true, but the tokenizer has no chat template; set it false.")
        return has_template if self.chat == "auto" else self.chat

    def check_row(self, row: Row) -> None:
        super().check_row(row)
        self.prompt(row, chat=False)

    def prompt(self, row: Row, *, chat: bool) -> Prompt:
        """Text, or messages where asked in chat."""
        value = row.get("prompt")
        template = self.template or ("{prompt}" if chat else self.plain_template)
        if isinstance(value, list) and self.template is None:
            messages = [dict(message) for message in value]
        else:
            text = filled(template, row, self.kind)
            if not chat:
                return text if self.system is None else f"{self.system}\n\n{text}"
            messages = [{"role": "user", "content": text}]
        return messages if self.system is None else [{"role": "system", "content": self.system}, *messages]


def filled(template: str, row: Row, kind: str) -> str:
    """The template with columns of the row in place of their names in braces."""
    try:
        return template.format_map(row)
    except (KeyError, IndexError, AttributeError, ValueError) as error:
        name = str(error.args[0]) if isinstance(error, KeyError) else str(error)
        hint = nearest(name, map(str, row)) if isinstance(error, KeyError) else ""
        raise DataError(
            f"task '{kind}': the template {template!r} can't be filled: no column {name!r}{hint}. Name it with "
            "`columns`, or write other columns into `template`; a brace that is text is doubled."
        ) from None


def encode(tokenizer: Any, prompt: Prompt, *, chat: bool) -> list[int]:
    """Token ids up to where the model answers."""
    from statewise.sources.templates import encode_prompt

    return list(encode_prompt(tokenizer, prompt, chat=chat))


def encode_answer(tokenizer: Any, prompt: Prompt, prompt_ids: Sequence[int], answer: str, *, chat: bool) -> list[int]:
    """Token ids of an answer after a prompt: those of the joined text beyond the prompt's, where they can be told."""
    if not chat and isinstance(prompt, str):
        joined = encode(tokenizer, prompt + answer, chat=False)
        if joined[: len(prompt_ids)] == list(prompt_ids) and len(joined) > len(prompt_ids):
            return joined[len(prompt_ids) :]
    ids = list(tokenizer.encode(answer, add_special_tokens=False))
    if not ids:
        raise DataError(f"the answer {answer!r} has no tokens, so it has no likelihood; remove it from the choices.")
    return ids


def shown(prompt: Prompt) -> str | list[Mapping[str, str]]:
    """The prompt as a record holds it."""
    return prompt if isinstance(prompt, str) else [dict(message) for message in prompt]
