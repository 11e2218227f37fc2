"""Prompts of a data set: what a source that samples completions starts from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statewise.errors import DataError
from statewise.sources.data import DataSource, made_once
from statewise.sources.rows import encode_question
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

    def check(self, example: Example) -> None:
        """Raises DataError where the source can't use an example."""

    def _read(self, world: World) -> _Prompts:
        return made_once(self, world, lambda: _prepare(self, world.tokenizer, world.base_dir))


def _prepare(source: PromptSource, tokenizer: Any, base_dir: Path) -> _Prompts:
    rows = source.read(base_dir)
    chosen = list(zip(rows.places, rows.rows, strict=True))[: source.limit]
    num_read = rows.num_bad + len(chosen)
    seen: Counter[str] = Counter()
    prompts: list[Prompt] = []
    for place, row in chosen:
        try:
            example, tokens = encode_question(source, tokenizer, row, place)
            source.check(example)
        except DataError as error:
            rows.reject(place, error, source.on_bad_row)
            continue
        seen[example.id] += 1
        if seen[example.id] > 1:
            example = replace(example, id=f"{example.id}#{seen[example.id]}")
        prompts.append(Prompt(tuple(tokens), example))
    if not prompts:
        raise DataError(f"{source.data}: no prompt is left (bad rows {rows.counts()}).")
    tokens_in_all = sum(len(p.tokens) for p in prompts)
    counts = {
        "rows": num_read,
        "prompts": len(prompts),
        "prompt_tokens": tokens_in_all,
        "repeated_ids": sum(count - 1 for count in seen.values()),
        "digest": _digest(prompts),
        "bad_rows": rows.counts(),
    }
    return _Prompts(prompts, counts)


def _digest(prompts: Sequence[Prompt]) -> str:
    """Of all prompts and reference answers."""
    digest = blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(f"{prompt.tokens} {prompt.example.answer!r}".encode("utf-8", "backslashreplace"))
    return digest.hexdigest()
