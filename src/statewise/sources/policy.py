"""The states of the policy itself: completions that the current weights write, in groups of one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from statewise.errors import RecipeError
from statewise.sources.prompts import Prompt, PromptSource
from statewise.sources.ranks import divided
from statewise.types import Author, Completion, Rollout, Sampling, Segment, derive_seed

if TYPE_CHECKING:
    from statewise.types import World


class PolicySource(PromptSource, kind="policy"):
    """`group_size` completions a prompt by the weights at the start of the step.

    Every rollout carries `behavior_logprobs`, those of the law that it was drawn from: softmax(logits / temperature),
    on the tokens that top_k and top_p keep. The policy that is trained is meant at the same temperature.
    truncated: what becomes of completions that reach max_tokens (or the end of the context) without an end token.
      "keep"      trained as they are
      "mask"      not trained; their reward still counts in the group's baseline
      "resample"  drawn again, at most `tries` times, then masked
    """

    needs_policy: ClassVar[bool] = True
    writes: ClassVar[tuple[str, ...]] = ("behavior_logprobs",)
    authors: ClassVar[tuple[Author, ...]] = ("policy",)

    group_size: int = Field(8, ge=1)
    max_tokens: int = Field(256, ge=1)
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    truncated: Literal["keep", "mask", "resample"] = "keep"
    tries: int = Field(4, ge=1)

    @property
    def policy_temperature(self) -> float:
        return self.temperature

    def describe(self) -> str:
        always = {"group_size", "max_tokens", "temperature"}
        shown = self.model_dump(mode="json", include=self.model_fields_set | always)
        return f"{self.kind}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

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

        def draw(own: list[Prompt], places: list[int]) -> list[list[_Drawn]]:
            rows = [place * self.group_size + i for place in places for i in range(self.group_size)]
            ids = [prompt.tokens for prompt in own for _ in range(self.group_size)]
            drawn = self._draw(ids, rows, step, world)
            return [drawn[i : i + self.group_size] for i in range(0, len(drawn), self.group_size)]

        groups = divided(prompts, draw, world)
        world.report(_measures([d for group in groups for d in group]))
        return [
            self._rollout(prompt, drawn.completion, index, world.step)
            for index, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
            for drawn in group
        ]

    def _draw(self, prompts: Sequence[Sequence[int]], rows: list[int], step: int, world: World) -> list[_Drawn]:
        """A completion for each prompt; with "resample", again for those that were cut short."""
        sampling = self._sampling(step, world)
        assert world.sampler is not None
        found = [_Drawn(c) for c in world.sampler.generate(prompts, sampling, rows=rows)]
        for attempt in range(1, self.tries + 1 if self.truncated == "resample" else 1):
            cut = [i for i, drawn in enumerate(found) if drawn.completion.stop_reason == "length"]
            if not cut:
                break
            again = replace(sampling, seed=derive_seed(sampling.seed, "again", attempt))
            fresh = world.sampler.generate([prompts[i] for i in cut], again, rows=[rows[i] for i in cut])
            for index, completion in zip(cut, fresh, strict=True):
                found[index] = _Drawn(completion, attempt)
        return found

    def _sampling(self, step: int, world: World) -> Sampling:
        from statewise.models.load import stop_ids

        return Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_ids=stop_ids(world.policy, world.tokenizer),
            seed=derive_seed(world.seed, "policy", step),
        )

    def _rollout(self, prompt: Prompt, completion: Completion, group: int, version: int) -> Rollout:
        trained = self.truncated == "keep" or completion.stop_reason == "stop"
        own = Segment(completion.tokens, "policy", trained, completion.logprobs, policy_version=version)
        segments = (Segment(prompt.tokens, "prompt"), own)
        return Rollout(segments, prompt.example, group=group, stop_reason=completion.stop_reason)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A completion, and how often it was drawn again."""

    completion: Completion
    again: int = 0


def _measures(drawn: Sequence[_Drawn]) -> dict[str, float]:
    """Of what was sampled, whether it is trained or not."""
    lengths = [len(d.completion.tokens) for d in drawn]
    return {
        "completion_tokens": fmean(lengths),
        "completion_tokens_max": max(lengths),
        "truncated_share": fmean(d.completion.stop_reason == "length" for d in drawn),
        "num_resampled": sum(d.again for d in drawn),
    }
