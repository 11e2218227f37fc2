"""The states of a teacher: completions that a frozen model writes, for distillation through text and off-policy rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from statewise.errors import RecipeError
from statewise.sources.prompts import Prompt, PromptSource
from statewise.sources.ranks import divided
from statewise.teachers import TeacherModel
from statewise.types import Author, Completion, Rollout, Sampling, Segment, derive_seed

if TYPE_CHECKING:
    from statewise.types import World


class TeacherSource(PromptSource, kind="teacher"):
    """`group_size` completions a prompt by `teacher`.

    The tokens are gold, and carry `behavior_logprobs`: those of the law they were drawn from, softmax(teacher's logits /
    temperature) on the tokens that top_k and top_p keep; temperature 0 is greedy.
    truncated: completions that reach max_tokens without an end token are trained ("keep") or not ("mask").
    cache: a folder (from the working directory) that keeps what teachers wrote, for every later run.
    """

    writes: ClassVar[tuple[str, ...]] = ("gold", "behavior_logprobs")
    authors: ClassVar[tuple[Author, ...]] = ("teacher",)

    teacher: TeacherModel
    group_size: int = Field(1, ge=1)
    max_tokens: int = Field(256, ge=1)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    truncated: Literal["keep", "mask"] = "keep"
    cache: str | None = None

    @model_validator(mode="after")
    def _keepable(self) -> TeacherSource:
        if self.cache and self.teacher.path == "ema":
            raise RecipeError("cache: 'ema' has other weights after every update, so nothing would be found again.")
        return self

    def models(self) -> tuple[TeacherModel, ...]:
        return (self.teacher,)

    def num_examples(self, world: World) -> int:
        """Completions in a pass through the prompts."""
        return super().num_examples(world) * self.group_size

    def sample(self, step: int, num_rollouts: int, world: World) -> list[Rollout]:
        """Groups number step * n ... of the endless sequence of epochs over the prompts."""
        if num_rollouts % self.group_size:
            raise RecipeError(
                f"source '{self.kind}': received {num_rollouts} rollouts for a step, expected a multiple of group_size = "
                f"{self.group_size}."
            )
        prompts = self.prompts_at(step, num_rollouts // self.group_size, world)
        asked = [prompt for prompt in prompts for _ in range(self.group_size)]
        model = world.open_model(self.teacher)
        sampling = Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_ids=model.stop_ids,
            seed=derive_seed(world.seed, "teacher", step),
        )

        def draw(own: list[Prompt], places: list[int]) -> list[Completion]:
            folder = None if self.cache is None else Path(self.cache)
            return list(model.generate([p.tokens for p in own], sampling, rows=places, folder=folder))

        drawn = divided(asked, draw, world)
        return [
            self._rollout(prompt, completion, index // self.group_size)
            for index, (prompt, completion) in enumerate(zip(asked, drawn, strict=True))
        ]

    def _rollout(self, prompt: Prompt, completion: Completion, group: int) -> Rollout:
        trained = self.truncated == "keep" or completion.stop_reason == "stop"
        own = Segment(completion.tokens, "teacher", trained, completion.logprobs)
        segments = (Segment(prompt.tokens, "prompt"), own)
        return Rollout(segments, prompt.example, group=group, stop_reason=completion.stop_reason)
