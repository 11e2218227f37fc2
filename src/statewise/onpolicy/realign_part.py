"""A part of a data set realigned: the pipeline, and phi of what there was and of what came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from statewise.onpolicy.realigned import Realigned
from statewise.settings import ModelSettings
from statewise.sources.hinted import HintedSource
from statewise.sources.prompts import Prompt
from statewise.sources.realigning import Note, Outcome
from statewise.types import World, derive_seed

# Of each part, so many hinted rows are also written by the imitator alone, for the page.
COMPARED = 2

Texts = list[Sequence[int]]


@dataclass(frozen=True)
class PartMaker:
    """Realigns prompts with a model, which is loaded when it is first needed."""

    source: HintedSource
    model: ModelSettings
    seed: int
    base_dir: Path
    note: Note

    @cached_property
    def policy(self) -> Any:
        import torch

        from statewise.models.load import load_policy
        from statewise.onpolicy.chunks import opened_model

        return load_policy(opened_model(self.model), device="cuda" if torch.cuda.is_available() else None)

    @cached_property
    def world(self) -> World:
        return World(self.policy.tokenizer, self.seed, policy=self.policy.model, base_dir=self.base_dir)

    @cached_property
    def realigner(self) -> Any:
        return replace(self.source.realigner(self.world), note=self.note)

    @cached_property
    def scorer(self) -> Any:
        import torch

        from statewise.models.score import InProcessScorer

        return InProcessScorer(self.policy.model, pad_id=self.policy.pad_id, dtype=torch.float32, frozen=True)

    def make(self, prompts: Sequence[Prompt], names: Sequence[int]) -> list[Realigned]:
        """The rows of the prompts; `names` are their numbers in the data, which name their random streams."""
        seed = derive_seed(self.seed, "realign")
        outcomes: list[Outcome] = self.realigner.realign(prompts, names, seed)
        texts: Texts = [text.tokens if (text := last_text(o)) else () for o in outcomes]
        sets = [[self._original(prompt) for prompt in prompts], texts, self._alone(prompts, outcomes, names, seed)]
        self.note("phi", 0, len(prompts))
        phi = [self._phi(prompts, ids) for ids in sets]
        columns = zip(*(zip(ids, values, strict=True) for ids, values in zip(sets, phi, strict=True)), strict=True)
        return [_row(*parts) for parts in zip(names, prompts, outcomes, columns, strict=True)]

    def _original(self, prompt: Prompt) -> Sequence[int]:
        """The ids of the row's own answer, as training on the data would have them."""
        from statewise.sources.templates import encode_prompt_completion

        example = prompt.example
        asked: Any = list(example.messages) or example.text or ""
        answer = self.source.answer_of(example)
        segments = encode_prompt_completion(self.policy.tokenizer, asked, answer, chat=self.source.chat)
        return tuple(t for s in segments if s.train for t in s.tokens)

    def _alone(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome], names: Sequence[int], seed: int) -> Texts:
        """What the imitator writes alone for the first few hinted prompts."""
        contexts = {i: o.context for i, o in enumerate(outcomes) if o.hinted is not None and o.context is not None}
        chosen = list(contexts)[:COMPARED]
        made = self.realigner.alone(
            [prompts[i] for i in chosen], [contexts[i] for i in chosen], [names[i] for i in chosen], seed
        )
        found: Texts = [() for _ in prompts]
        for i, text in zip(chosen, made, strict=True):
            found[i] = text.tokens
        return found

    def _phi(self, prompts: Sequence[Prompt], texts: Texts) -> list[list[float]]:
        """phi of each text behind its prompt; none where the model has no room for it."""
        from statewise.models.batching import num_positions
        from statewise.onpolicy.cll import score_sequences

        room = num_positions(self.policy.model)
        fits = [i for i, (p, t) in enumerate(zip(prompts, texts, strict=True)) if t and len(p.tokens) + len(t) <= room]
        whole = [[*prompts[i].tokens, *texts[i]] for i in fits]
        masks = [[False] * len(prompts[i].tokens) + [True] * len(texts[i]) for i in fits]
        found: list[list[float]] = [[] for _ in prompts]
        for i, statistics in zip(fits, score_sequences(self.scorer, whole, masks), strict=True):
            found[i] = statistics.phi.tolist()
        return found


def last_text(outcome: Outcome) -> Any:
    """What was kept, else the last that was tried."""
    return outcome.kept or outcome.hinted or outcome.own


def _row(
    index: int, prompt: Prompt, outcome: Outcome, columns: Sequence[tuple[Sequence[int], list[float]]]
) -> Realigned:
    text, example = last_text(outcome), prompt.example
    original, written, alone = columns
    return Realigned(
        index=index,
        id=example.id,
        kind=outcome.kind,
        prompt=[dict(m) for m in example.messages] or example.text,
        answer=example.answer,
        reward=outcome.reward,
        stop_reason=text.stop_reason if text else None,
        delimiter_at=text.delimiter_at if text else None,
        prompt_ids=prompt.tokens,
        original_ids=original[0],
        original_phi=original[1],
        text_ids=written[0],
        text_phi=written[1],
        text_weights=text.weights if text else (),
        alone_ids=alone[0],
        alone_phi=alone[1],
    )
