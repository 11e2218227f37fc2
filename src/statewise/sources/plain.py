"""Prompts of plain text under a tokenizer that has a chat template: usual with base models, a silent fault with others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statewise.sources.data import DataSource

if TYPE_CHECKING:
    from statewise.types import Example, World


def untemplated(source: Any, world: World) -> str | None:
    """What to say where the data's prompts are text, the tokenizer has a chat template and `chat` was left to "auto".

    None where there is nothing to say: messages, texts without a prompt, ids of the row's own, `chat` set by the user.
    """
    for leaf in source.leaves:
        if isinstance(leaf, DataSource) and leaf.chat == "auto" and world.tokenizer.chat_template is not None:
            first = next(iter(leaf.examples(world)), None)
            said = first and untemplated_row(leaf, world.tokenizer, first)
            if said:
                return said
    return None


def untemplated_row(source: DataSource, tokenizer: Any, example: Example, setting: str = "source.chat") -> str | None:
    """The same of a source's first row. `setting`: the name by which the user sets `chat`."""
    if tokenizer.chat_template is None or source.chat != "auto":
        return None
    if example.text is None or "input_ids" in example.metadata:
        return None
    return (
        f"prompts of {source.data} are plain text, so they go in without the chat template that the tokenizer has. "
        f"A chat model expects it, and evaluations use it: set {setting} = true; false says that this is meant."
    )
