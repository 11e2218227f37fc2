"""Prompts of a data set: what a source that samples completions starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statewise.errors import DataError
from statewise.sources.data import DataSource, made_once
from statewise.sources.rows import answer_of, example_of, prompt_of
from statewise.sources.templates import encode_prompt
from statewise.types import Example

if TYPE_CHECKING:
    from statewise.types import World


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids that sampling starts from, and what is asked."""

    tokens: tuple[int, ...]
    example: Example


@dataclass(frozen=True)
class _Prompts:
    prompts: list[Prompt]
    counts: dict[str, Any]


class PromptSource(DataSource):
    """Completions of a data set's prompts: of `prompt` (text or messages), or of `messages` up to the last answer.

    The reference answer is the column `answer`, else the text of the completion that the row holds.
    """

    def prompts(self, world: World) -> list[Prompt]:
        """All prompts, in the order of the rows; read once."""
        return self._read(world).prompts

    def prompts_at(self, step: int, count: int, world: World) -> list[Prompt]:
        """The `count` prompts of a step, a function of (seed, step)."""
        prompts = self.prompts(world)
        return [prompts[i] for i in self.places(step * count, (step + 1) * count, len(prompts), world.seed)]

    def num_examples(self, world: World) -> int:
        prepared = self._read(world)
        world.record({"source": self.data, **prepared.counts})
        return len(prepared.prompts)

    def examples(self, world: World) -> list[Example]:
        return [prompt.example for prompt in self.prompts(world)]

    def _read(self, world: World) -> _Prompts:
        return made_once(self, world, lambda: _prepare(self, world.tokenizer, world.base_dir))


def _prepare(source: PromptSource, tokenizer: Any, base_dir: Path) -> _Prompts:
    rows = source.read(base_dir)
    prompts: dict[str, Prompt] = {}
    for place, row in list(zip(rows.places, rows.rows, strict=True))[: source.limit]:
        try:
            prompt = _prompt(source, tokenizer, row, place)
        except DataError as error:
            rows.reject(place, str(error).rstrip("."), source.on_bad_row)
            continue
        if prompt.example.id in prompts:
            rows.reject(place, f"id: '{prompt.example.id}' occurs twice", source.on_bad_row)
            continue
        prompts[prompt.example.id] = prompt
    if not prompts:
        raise DataError(f"{source.data}: no prompt is left (bad rows {rows.counts()}).")
    tokens = sum(len(p.tokens) for p in prompts.values())
    counts = {"rows": len(rows.rows), "prompts": len(prompts), "prompt_tokens": tokens, "bad_rows": rows.counts()}
    return _Prompts(list(prompts.values()), counts)


def _prompt(source: PromptSource, tokenizer: Any, row: Mapping[str, Any], place: str) -> Prompt:
    prompt, chat = prompt_of(source, row)
    example = example_of(source, row, place)
    answer = answer_of(source, row) if example.answer is None else example.answer
    shown = {"text": prompt} if isinstance(prompt, str) else {"messages": tuple(prompt), "text": None}
    return Prompt(tuple(encode_prompt(tokenizer, prompt, chat=chat)), replace(example, answer=answer, **shown))
