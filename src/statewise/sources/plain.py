"""Prompts of plain text under a tokenizer that has a chat template: usual with base models, a silent fault with others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statewise.sources.data import DataSource

if TYPE_CHECKING:
    from statewise.types import World


def untemplated(source: Any, world: World) -> str | None:
    """What to say where the data's prompts are text, the tokenizer has a chat template and `chat` was left to "auto".

    None where there is nothing to say: messages, texts without a prompt, ids of the row's own, `chat` set by the user.
    """
    if world.tokenizer.chat_template is None:
        return None
    for leaf in source.leaves:
        if not isinstance(leaf, DataSource) or leaf.chat != "auto":
            continue
        first = next(iter(leaf.examples(world)), None)
        if first is not None and first.text is not None and "input_ids" not in first.metadata:
            return (
                f"prompts of {leaf.data} are plain text, so they go in without the chat template that the tokenizer has. "
                "A chat model expects it, and evaluations use it: set source.chat = true; false says that this is meant."
            )
    return None
