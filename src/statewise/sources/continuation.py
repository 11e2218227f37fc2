"""States of the policy with answers of a teacher: the policy writes a prefix, the teacher goes on from there."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from statewise.errors import RecipeError
from statewise.sources.prompts import Prompt, PromptSource
from statewise.sources.ranks import divided
from statewise.teachers import TeacherModel
from statewise.types import Author, Completion, Rollout, Sampling, Segment, derive_seed

if TYPE_CHECKING:
    from statewise.types import World

SENTENCE_ENDS = (".", "!", "?", "\n")


class ContinuationSource(PromptSource, kind="continuation"):
    """The teacher's tokens after a prefix that the policy wrote; they are gold, the prefix is not trained.

    The policy writes a completion of n tokens, at most `max_tokens`; its first c are kept, 0 <= c < n, so that the teacher
    starts from a state that the policy visits (c = 0: the prompt).
    cut: "uniform"   every such state alike
         "sentence"  a state behind the end of a sentence or line, every one alike; the prompt where there is none
         "fraction"  c = floor(fraction n)
         "entropy"   the state where the policy's next-token entropy is largest
    tokens: how many the teacher writes at most; without it to its end token, `max_tokens` at most.
    temperature is the policy's, teacher_temperature the teacher's (0 is greedy).
    """

    needs_policy: ClassVar[bool] = True
    writes: ClassVar[tuple[str, ...]] = ("gold", "behavior_logprobs")
    authors: ClassVar[tuple[Author, ...]] = ("teacher",)

    teacher: TeacherModel
    tokens: int | None = Field(None, ge=1)
    cut: Literal["uniform", "sentence", "fraction", "entropy"] = "uniform"
    fraction: float | None = Field(None, ge=0, lt=1)
    max_tokens: int = Field(256, ge=1)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    teacher_temperature: float = Field(1.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _fraction(self) -> ContinuationSource:
        if (self.cut == "fraction") != (self.fraction is not None):
            raise RecipeError("source.fraction: belongs to cut = 'fraction', which needs it.")
        return self

    def models(self) -> tuple[TeacherModel, ...]:
        return (self.teacher,)

    def sample(self, step: int, num_rollouts: int, world: World) -> list[Rollout]:
        """Prompts number step * n ... of the endless sequence of epochs."""
        prompts = self.prompts_at(step, num_rollouts, world)
        written = divided(prompts, lambda own, places: self._write(own, places, step, world), world)
        cuts = self._cuts(prompts, written, step, world)
        starts = [(*p.tokens, *w.tokens[:c]) for p, w, c in zip(prompts, written, cuts, strict=True)]
        answers = divided(starts, lambda own, places: self._continue(own, places, step, world), world)
        world.report(
            {
                "prefix_tokens": fmean(cuts),
                "completion_tokens": fmean(len(w.tokens) for w in written),
                "continuation_tokens": fmean(len(a.tokens) for a in answers),
                "continuation_ended_share": fmean(a.stop_reason == "stop" for a in answers),
            }
        )
        return [
            Rollout(
                (
                    Segment(prompt.tokens, "prompt"),
                    Segment(own.tokens[:cut], "policy", False, own.logprobs[:cut], policy_version=step),
                    Segment(answer.tokens, "teacher", True, answer.logprobs),
                ),
                prompt.example,
                group=index,
                stop_reason=answer.stop_reason,
            )
            for index, (prompt, own, cut, answer) in enumerate(zip(prompts, written, cuts, answers, strict=True))
        ]

    def _write(self, prompts: list[Prompt], places: list[int], step: int, world: World) -> list[Completion]:
        from statewise.models.load import stop_ids

        assert world.sampler is not None
        sampling = Sampling(
            self.max_tokens,
            self.temperature,
            stop_ids=stop_ids(world.policy, world.tokenizer),
            seed=derive_seed(world.seed, "prefix", step),
        )
        return world.sampler.generate([p.tokens for p in prompts], sampling, rows=places)

    def _continue(self, starts: list[tuple[int, ...]], places: list[int], step: int, world: World) -> list[Completion]:
        model = world.open_model(self.teacher)
        sampling = Sampling(
            self.tokens or self.max_tokens,
            self.teacher_temperature,
            stop_ids=model.stop_ids,
            seed=derive_seed(world.seed, "continuation", step),
        )
        return list(model.sampler.generate(starts, sampling, rows=places))

    def _cuts(self, prompts: list[Prompt], written: list[Completion], step: int, world: World) -> list[int]:
        """How many of its tokens are kept of each completion."""
        lengths = [len(w.tokens) for w in written]
        if self.cut == "fraction":
            return [int((self.fraction or 0.0) * n) for n in lengths]
        if self.cut == "entropy":
            return _most_uncertain(prompts, written, world)
        places: list[Sequence[int]] = [range(n) for n in lengths]
        if self.cut == "sentence":
            places = [_sentence_ends(w.tokens, world.tokenizer) or (0,) for w in written]
        draws = np.random.default_rng(derive_seed(world.seed, "cut", step)).random(len(written))
        return [int(own[int(u * len(own))]) for own, u in zip(places, draws, strict=True)]


def _most_uncertain(prompts: list[Prompt], written: list[Completion], world: World) -> list[int]:
    assert world.scorer is not None
    texts = [(*p.tokens, *w.tokens) for p, w in zip(prompts, written, strict=True)]
    scores = world.scorer.score(texts, needs=("entropy",))
    own = [s["entropy"][len(p.tokens) :] for p, s in zip(prompts, scores, strict=True)]
    return [max(range(len(entropy)), key=lambda i: (entropy[i], -i)) for entropy in own]


def _sentence_ends(tokens: Sequence[int], tokenizer: object) -> list[int]:
    """Numbers of tokens, fewer than all, behind which a sentence or a line ends."""
    texts = [tokenizer.decode([t]).rstrip(" ") for t in tokens]  # type: ignore[attr-defined]
    return [i + 1 for i, text in enumerate(texts[:-1]) if text.endswith(SENTENCE_ENDS)]
