"""Sampling from the policy with vLLM: an engine in this process, or a server, that is handed the weights before each step.

An engine keeps weights of its own, so it may be stale without anybody noticing. Therefore every hand-over has a version,
and after it the log-probabilities of a few sampled sequences are compared with the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from statewise.errors import EndpointError, RecipeError, StatewiseError
from statewise.models.law import check_law
from statewise.models.load import LoadedPolicy
from statewise.models.score import InProcessScorer
from statewise.types import Completion, Sampling

# Mean difference in nats between two right implementations: rounding of hidden states; bf16 has 0.03.
GAPS = {"float32": 0.002, "float16": 0.02, "bfloat16": 0.1}
EARLIER = " A server that an earlier run handed all its weights to still has them below the adapter: start it anew for a LoRA."
CHECKED_ROWS, CHECKED_TOKENS = 8, 512  # sequences that are compared after a hand-over, and tokens of each at most


@dataclass(frozen=True)
class HandOver:
    """Weights of one step: tensors by checkpoint name, or for a LoRA none, and `write(folder)` for either on disk."""

    version: int
    tensors: Callable[[], Mapping[str, Tensor]]
    write: Callable[[Path], None]
    is_adapter: bool


class Engine(Protocol):
    """What `VllmSampler` needs of vLLM, in this process or behind a server."""

    def hand_over(self, weights: HandOver) -> None: ...

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, rows: Sequence[int]
    ) -> list[Completion]: ...


def all_tensors(model: Any) -> dict[str, Tensor]:
    """Every tensor under every name it has. A tied head is there twice: vLLM, told of the embedding alone, keeps the old
    head."""
    return {name: value.detach() for name, value in model.state_dict(keep_vars=True).items()}


def write_all(model: Any, folder: Path) -> None:
    """Config and all tensors, as vLLM reads them."""
    from safetensors.torch import save_file

    model.config.save_pretrained(folder)
    tensors = {name: value.to("cpu", copy=True).contiguous() for name, value in all_tensors(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@dataclass
class VllmSampler:
    """The `Sampler` protocol on an engine.

    gap: largest mean difference in nats to the trainer's log-probabilities. agree: an error, or None, of every rank in, the
    first of all out; hands: whether this rank hands over (one does, where a server samples for all).
    """

    engine: Engine
    gap: float
    hands: bool = True
    agree: Callable[[StatewiseError | None], StatewiseError | None] = lambda problem: problem
    version: int | None = None
    last_gap: float | None = None
    _policy: Any = None
    _unchecked: bool = False

    def load(self, policy: Any, version: int = 0) -> None:
        """Hand the weights of step `version` over. Collective. Raises EndpointError where the engine does not take them."""
        model = policy.model if isinstance(policy, LoadedPolicy) else policy
        problem: StatewiseError | None = None
        if self.hands:
            try:
                self.engine.hand_over(_hand_over(model, version))
            except StatewiseError as error:
                problem = error
        problem = self.agree(problem)
        if problem is not None:
            raise problem
        self.version, self._policy, self._unchecked = version, model, True

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, rows: Sequence[int] | None = None
    ) -> list[Completion]:
        """One completion a prompt, in the order of the prompts; row i's seed is the stream (seed, "row", rows[i]).

        Raises EndpointError where the engine's log-probabilities are not the trainer's.
        """
        check_law(sampling)
        if self.version is None:
            raise EndpointError("vLLM: was asked to sample before it was handed any weights.")
        done = self.engine.generate(prompts, sampling, range(len(prompts)) if rows is None else rows)
        if self._unchecked and sampling.top_p == 1 and sampling.top_k == 0:
            self._compare(prompts, done, sampling)
        return done

    def _compare(self, prompts: Sequence[Sequence[int]], done: Sequence[Completion], sampling: Sampling) -> None:
        pairs = [(p, c) for p, c in zip(prompts, done, strict=True) if c.tokens]
        chosen = pairs[:: max(1, len(pairs) // CHECKED_ROWS)][:CHECKED_ROWS]
        if not chosen:
            return
        texts = [[*p, *c.tokens[:CHECKED_TOKENS]] for p, c in chosen]
        scorer = InProcessScorer(self._policy, pad_id=0)
        scored = scorer.score(texts, temperature=sampling.temperature or 1.0)
        gaps = [
            abs(a - b)
            for (prompt, completion), values in zip(chosen, scored, strict=True)
            for a, b in zip(completion.logprobs, values["logprobs"][len(prompt) :], strict=False)
        ]
        self.last_gap, self._unchecked = sum(gaps) / len(gaps), False
        if not self.last_gap <= self.gap:
            raise EndpointError(
                f"vLLM: after the hand-over of step {self.version} its log-probabilities differ from the trainer's by "
                f"{self.last_gap:.3g} nats on average over {len(gaps)} sampled tokens (at most {self.gap:g} expected), so it "
                "samples from other weights, from another law or in another precision. See that it serves this model, was "
                "started with --logprobs-mode processed_logprobs, and has the trainer's dtype; model.sampler.gap sets the limit."
                f"{EARLIER if hasattr(self._policy, 'peft_config') else ''}"
            )


def _hand_over(model: Any, version: int) -> HandOver:
    if hasattr(model, "peft_config"):
        return HandOver(version, dict, lambda folder: model.save_pretrained(folder, save_embedding_layers=False), True)
    return HandOver(version, lambda: all_tensors(model), lambda folder: write_all(model, folder), False)


def check_adapter(adapter: Any) -> None:
    """Raises RecipeError where vLLM can't serve such an adapter."""
    given = [name for name in ("dora", "modules_to_save") if getattr(adapter, name, None)]
    if given:
        raise RecipeError(
            f"model.adapter.{given[0]}: vLLM can't serve it; train a plain LoRA or all parameters, or take model.sampler = "
            "'built-in'."
        )


def default_gap(dtype: torch.dtype) -> float:
    """The largest mean difference between engine and trainer that rounding in this dtype makes."""
    return GAPS.get(str(dtype).removeprefix("torch."), GAPS["bfloat16"])
