"""Answers that the policy writes itself: its own where they are right, else by Hinted Decoding; a verifier has the last word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from statewise.models.batching import num_positions
from statewise.models.delimiter import Delimiter
from statewise.models.hinted import HintedCompletion, HintedDecoder, HintedPrompt
from statewise.models.hinted_law import HintedLaw
from statewise.sources.hints import Hint
from statewise.sources.judging import scored
from statewise.sources.prompts import Prompt
from statewise.types import derive_seed
from statewise.verifier import Judge, Verifier

if TYPE_CHECKING:
    from statewise.types import Example

Kind = Literal["own", "realigned", "failed", "no_delimiter", "repeated", "too_long", "no_analysis"]
KINDS: tuple[Kind, ...] = get_args(Kind)
KEPT: tuple[Kind, ...] = ("own", "realigned")

Note = Callable[[str, int, int], None]  # stage, texts done, texts in all


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a prompt.

    kind: "own" (the model's own answer was right), "realigned" (the hinted one was), or why there is none: "failed" the
    verifier, "no_delimiter" came, "repeated" itself, "too_long" (the text, or the hinted context for the model),
    "no_analysis" under the heading. own, hinted: the last text of each stage; reward: of the kept text.
    """

    kind: Kind
    own: HintedCompletion | None = None
    hinted: HintedCompletion | None = None
    context: tuple[int, ...] | None = None
    reward: float | None = None

    @property
    def kept(self) -> HintedCompletion | None:
        return {"own": self.own, "realigned": self.hinted}.get(self.kind)


@dataclass(frozen=True)
class Realigner:
    """The pipeline over prompts of one model.

    law: its seed is set for each stage. own_tries, tries: texts at most of each stage. threshold: least score of a right one.
    answer_of: the reference solution of an example, as the imitator sees it.
    """

    decoder: HintedDecoder
    tokenizer: Any
    law: HintedLaw
    hint: Hint
    delimiter: str | None
    verifier: Verifier
    judge: Judge
    answer_of: Callable[[Example], str]
    threshold: float = 1.0
    own_tries: int = 1
    tries: int = 1
    note: Note = lambda stage, done, count: None

    def realign(self, prompts: Sequence[Prompt], names: Sequence[int], seed: int) -> list[Outcome]:
        """An outcome a prompt; `names` name their random streams."""
        found = [Outcome("failed") for _ in prompts]
        for attempt in range(self.own_tries):
            self._own(prompts, names, derive_seed(seed, "own", attempt), found)
        self._contexts(prompts, names, derive_seed(seed, "analysis"), found)
        for attempt in range(self.tries):
            self._hinted(prompts, names, derive_seed(seed, "hinted", attempt), found)
        return found

    def alone(
        self, prompts: Sequence[Prompt], contexts: Sequence[Sequence[int]], names: Sequence[int], seed: int
    ) -> list[HintedCompletion]:
        """What the imitator writes without the plain stream (lambda = 0 everywhere): self-distillation, for comparison."""
        law = replace(self.law, beta=0.0, rule="linear", seed=derive_seed(seed, "alone"))
        pairs = [HintedPrompt(p.tokens, c) for p, c in zip(prompts, contexts, strict=True)]
        return self.decoder_for("alone").decode(pairs, law, rows=names)

    def _own(self, prompts: Sequence[Prompt], names: Sequence[int], seed: int, found: list[Outcome]) -> None:
        """The plain stream alone, for prompts that it has not solved yet."""
        open_ = [i for i, outcome in enumerate(found) if outcome.kind != "own" and self._fits(prompts[i].tokens)]
        pairs = [HintedPrompt(prompts[i].tokens) for i in open_]
        for i, text in zip(open_, self._decode("own", pairs, open_, names, seed), strict=True):
            reward = self._reward(text, prompts[i].example) if text.stop_reason == "stop" else 0.0
            right = reward >= self.threshold
            found[i] = Outcome("own" if right else "failed", own=text, reward=reward if right else None)

    def _contexts(self, prompts: Sequence[Prompt], names: Sequence[int], seed: int, found: list[Outcome]) -> None:
        """The imitator's context of every prompt that has no answer of its own, with its analysis where the hint asks for one."""
        open_ = [i for i, outcome in enumerate(found) if outcome.kind != "own"]
        starts = {i: self._start(prompts[i].example) for i in open_}
        for i, start in starts.items():
            fits = self._fits(start) and self._fits(prompts[i].tokens)
            found[i] = replace(found[i], kind="failed" if fits else "too_long", context=tuple(start) if fits else None)
        analysis = self.hint.analysis
        if analysis is None:
            return
        open_ = [i for i in open_ if found[i].context is not None]
        law = HintedLaw(analysis.max_tokens, temperature=0.0, stop_ids=self.law.stop_ids, seed=seed)
        mark = Delimiter(f"\n{analysis.heading}", self.tokenizer)
        texts = self.decoder_for("analysis").decode(
            [HintedPrompt(starts[i]) for i in open_],
            law,
            delimiter=mark,
            stop_at_delimiter=True,
            rows=[names[i] for i in open_],
        )
        for i, text in zip(open_, texts, strict=True):
            ended = text.stop_reason == "delimiter"
            context = (*starts[i], *text.tokens) if ended else None
            kind: Kind = "no_analysis" if context is None else "failed" if self._fits(context) else "too_long"
            found[i] = replace(found[i], kind=kind, context=context if kind == "failed" else None)

    def _start(self, example: Example) -> list[int]:
        context = self.hint.encode(self.tokenizer, example, self.answer_of(example), self.delimiter)
        return [*context, *self.hint.opened_by(self.tokenizer)]

    def _hinted(self, prompts: Sequence[Prompt], names: Sequence[int], seed: int, found: list[Outcome]) -> None:
        open_ = [i for i, o in enumerate(found) if o.kind not in KEPT and o.context is not None]
        pairs = [HintedPrompt(prompts[i].tokens, found[i].context) for i in open_]
        for i, text in zip(open_, self._decode("hinted", pairs, open_, names, seed), strict=True):
            reward = self._reward(text, prompts[i].example)
            kind = self._kind(text, reward)
            found[i] = replace(found[i], kind=kind, hinted=text, reward=reward if kind == "realigned" else None)

    def _kind(self, text: HintedCompletion, reward: float) -> Kind:
        if text.stop_reason != "stop":
            return "repeated" if text.stop_reason == "repeated" else "too_long"
        if self.delimiter is not None and text.delimiter_at is None:
            return "no_delimiter"
        return "realigned" if reward >= self.threshold else "failed"

    def _decode(
        self, stage: str, pairs: list[HintedPrompt], places: Sequence[int], names: Sequence[int], seed: int
    ) -> list[HintedCompletion]:
        mark = None if self.delimiter is None else Delimiter(self.delimiter, self.tokenizer)
        law = replace(self.law, seed=seed)
        return self.decoder_for(stage).decode(pairs, law, delimiter=mark, rows=[names[i] for i in places])

    def decoder_for(self, stage: str) -> HintedDecoder:
        """The decoder, with its progress named after the stage."""
        self.decoder.progress = lambda done, count: self.note(stage, done, count)
        return self.decoder

    def _fits(self, context: Sequence[int]) -> bool:
        return 0 < len(context) < num_positions(self.decoder.model)

    def _reward(self, text: HintedCompletion, example: Example) -> float:
        words = str(self.tokenizer.decode(list(text.tokens), skip_special_tokens=True))
        return scored(self.verifier, self.judge, words, example) or 0.0


def yields(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many outcomes there are of each kind."""
    counts = Counter(outcome.kind for outcome in outcomes)
    return {kind: counts[kind] for kind in KINDS}
