"""Answers of a data set in the policy's own words: its own where they are right, else by Hinted Decoding (arXiv 2602.12222)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from statewise.component import Source
from statewise.errors import RecipeError
from statewise.sources.judging import self_test
from statewise.sources.prompts import Prompt, PromptSource
from statewise.sources.ranks import divided
from statewise.sources.reading import RowError
from statewise.sources.rows import written_answer
from statewise.types import Author, Example, Rollout, Segment, derive_seed
from statewise.verifier import Verifier, parse_verifier

if TYPE_CHECKING:
    from statewise.models.hinted_law import HintedLaw
    from statewise.sources.hints import Hint
    from statewise.sources.realigning import Outcome, Realigner
    from statewise.types import World


class HintedSource(PromptSource, kind="hinted"):
    """The policy answers each prompt alone (`own_tries` times); where no answer is right, two of its streams write one
    (`tries` times): the imitator is shown the row's answer by `hint`, the plain stream is not. What the verifier accepts is gold,
    so that a step may hold fewer rollouts than prompts, or none.

    writer: the "policy" at its current weights, or at "step0", as in a data set that was realigned beforehand.
    hint: a shipped one (instruct, analysis, thinking, base, echo), a TOML file, or "auto".
    delimiter: behind this text the plain stream writes alone; "auto": the hint's, else what the data's answers use
    (\\boxed{ or ####); "none". Texts without it are discarded.
    beta, rule, low, high, temperature, top_p, order, first_from_imitator, repeat_*: see `HintedLaw`.
    remove: regular expressions whose matches are deleted from the answers shown. Rollouts have columns `hint_weights` (lambda)
    and `behavior_phi` (phi of the plain stream when the token was drawn).
    """

    needs_policy: ClassVar[bool] = True
    writes: ClassVar[tuple[str, ...]] = ("gold", "hint_weights", "behavior_phi")
    authors: ClassVar[tuple[Author, ...]] = ("policy",)

    writer: Literal["policy", "step0"] = "policy"
    verifier: Verifier
    threshold: float = Field(1.0, allow_inf_nan=False)
    self_test: bool = True
    hint: str = "auto"
    delimiter: str = "auto"
    own_tries: int = Field(1, ge=0)
    tries: int = Field(1, ge=1)
    max_tokens: int = Field(1024, ge=1)
    beta: float = Field(3.0, ge=0, allow_inf_nan=False)
    rule: Literal["linear", "sigmoid", "piecewise"] = "linear"
    low: float = Field(0.3, ge=0)
    high: float = Field(0.7, le=1)
    temperature: float = Field(0.3, ge=0, allow_inf_nan=False)
    top_p: float = Field(0.95, gt=0, le=1)
    order: Literal["nucleus_first", "temperature_first"] = "nucleus_first"
    first_from_imitator: bool = True
    repeat_window: int = Field(30, ge=1)
    repeat_count: int = Field(5, ge=0)
    remove: list[str] = []

    @field_validator("verifier", mode="before")
    @classmethod
    def _parsed(cls, value: Any) -> Any:
        return parse_verifier(value, "source.verifier")

    @field_serializer("verifier")
    def _plain(self, value: Verifier) -> Any:
        return value.to_plain()

    @field_validator("remove")
    @classmethod
    def _compiles(cls, value: list[str]) -> list[str]:
        for pattern in value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise RecipeError(f"source.remove: '{pattern}' is no regular expression: {error}.") from None
        return value

    @model_validator(mode="after")
    def _bounds(self) -> HintedSource:
        if self.low >= self.high:
            raise RecipeError(f"source.low: received {self.low} and high = {self.high}; expected low < high.")
        return self

    def files(self) -> tuple[str, ...]:
        return (*self.verifier.files(), self.hint)

    def before_training(self, source: Source, world: World) -> None:
        if self.self_test:
            self_test(self.verifier, self.examples(world), world.base_dir, "source.verifier")

    def sample(self, step: int, num_rollouts: int, world: World) -> list[Rollout]:
        """What is kept of `num_rollouts` prompts."""
        from statewise.sources.realigning import yields

        prompts = self.prompts_at(step, num_rollouts, world)
        realigner = self.realigner(world)
        seed = derive_seed(world.seed, "realign", step)
        outcomes = divided(prompts, lambda own, places: realigner.realign(own, places, seed), world)
        counts = yields(outcomes)
        world.report({f"{kind}_share": count / len(outcomes) for kind, count in counts.items()} | _measures(outcomes))
        pairs = zip(prompts, outcomes, strict=True)
        return [_rollout(prompt, outcome, index, step) for index, (prompt, outcome) in enumerate(pairs) if outcome.kept]

    def law(self, stop_ids: tuple[int, ...] = ()) -> HintedLaw:
        """The settings of decoding, as the decoder takes them."""
        from dataclasses import fields

        from statewise.models.hinted_law import HintedLaw

        own = {f.name: getattr(self, f.name) for f in fields(HintedLaw) if f.name in type(self).model_fields}
        return HintedLaw(**{**own, "stop_ids": stop_ids, "seed": 0})

    def realigner(self, world: World, **settings: Any) -> Realigner:
        """The pipeline on the writer; `settings`: of HintedDecoder. Raises RecipeError for a hint that is none."""
        from statewise.models.hinted import HintedDecoder
        from statewise.models.load import pad_id, stop_ids
        from statewise.sources.realigning import Realigner

        _, hint, delimiter = self.shown(world)
        model, sampler = world.policy, world.sampler
        if self.writer == "step0":
            opened = world.open_model("step0")
            model, sampler = opened.policy.model, opened.sampler
        decoder = HintedDecoder(model, pad_id=pad_id(world.tokenizer), **settings)
        decoder.count = getattr(sampler, "count", None)  # in a run, what is written is counted
        return Realigner(
            decoder,
            world.tokenizer,
            self.law(stop_ids(world.policy, world.tokenizer)),
            hint,
            delimiter,
            self.verifier,
            self.verifier.opened(world.base_dir),
            self.answer_of,
            self.threshold,
            self.own_tries,
            self.tries,
        )

    def shown(self, world: World) -> tuple[str, Hint, str | None]:
        """Name of the hint, the hint, and the delimiter (None: there is none), chosen where they are "auto"."""
        from statewise.sources.hints import choose_delimiter, choose_hint, load_hint

        examples = self.examples(world)
        name = choose_hint(world.tokenizer, examples[0]) if self.hint == "auto" else self.hint
        hint = load_hint(name, world.base_dir)
        if self.delimiter == "auto":
            return name, hint, choose_delimiter(hint, [self.answer_of(example) for example in examples])
        return name, hint, None if self.delimiter == "none" else self.delimiter

    def check(self, example: Example) -> None:
        self.answer_of(example)

    def answer_of(self, example: Example) -> str:
        """The reference solution as the imitator sees it. Raises RowError where the row has none."""
        written = written_answer(self, dict(example.metadata))
        if not written or not written.strip():
            raise RowError(
                'has no answer to show; name its column in source.columns, such as { completion = "solution" }',
                f"it has {', '.join(map(str, example.metadata))}",
            )
        for pattern in self.remove:
            written = re.sub(pattern, "", written)
        return written


def _rollout(prompt: Prompt, outcome: Outcome, group: int, step: int) -> Rollout:
    text = outcome.kept
    assert text is not None
    before = [0.0] * len(prompt.tokens)
    segments = (Segment(prompt.tokens, "prompt"), Segment(text.tokens, "policy", True, policy_version=step))
    rollout = Rollout(segments, prompt.example, group, outcome.reward, stop_reason=text.stop_reason)
    return rollout.with_columns(hint_weights=[*before, *text.weights], behavior_phi=[*before, *text.phi])


def _measures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Of the kept texts: how many, and mean phi of their tokens."""
    phi = [value for outcome in outcomes if outcome.kept for value in outcome.kept.phi]
    return {"num_kept": sum(1 for o in outcomes if o.kept), "kept_phi": fmean(phi) if phi else 0.0}
