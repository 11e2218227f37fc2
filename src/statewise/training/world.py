"""Opening the resources of a run: policy, learner, engines, reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from statewise.errors import RecipeError
from statewise.models.generate import InProcessSampler
from statewise.models.load import LoadedPolicy, load_policy
from statewise.recipe import Recipe
from statewise.training.distributed import is_sharded
from statewise.training.hooks import freeze_others
from statewise.training.learner import Dense, Learner
from statewise.training.packing import check_packing, micro_batches
from statewise.training.usage import CountedEngine, Usage, forward_flops, num_tokens
from statewise.types import Batch, derive_seed


@dataclass(frozen=True)
class LearnerScorer:
    """The `Scorer` protocol through the wrapped learner, so that it works on sharded weights."""

    learner: Any
    pad_id: int
    max_tokens: int
    device: Any
    temperature: float = 1.0

    def score(self, sequences: Sequence[Sequence[int]], needs: Sequence[str] = ("logprobs",)) -> list[dict[str, Any]]:
        """Per sequence {"logprobs", "entropy"}: one float a token, 0 at token 0."""
        from statewise.types import Example, Rollout, Segment

        rollouts = [Rollout((Segment(tuple(s), "dataset", True),), Example(id=str(i))) for i, s in enumerate(sequences)]
        out: list[dict[str, Any]] = [{} for _ in sequences]
        training = self.learner.training
        self.learner.eval()
        for batch in micro_batches(rollouts, pad_id=self.pad_id, max_tokens=self.max_tokens):
            batch = replace(batch.to(self.device), temperature=self.temperature)
            stats = self.learner(batch, mode="stats")
            for row, name in enumerate(batch.example_ids):
                length = len(sequences[int(name)])
                out[int(name)] = {n: getattr(stats, n)[row, :length].tolist() for n in needs}
        self.learner.train(training)
        return out


def open_sampler(
    recipe: Recipe, policy: LoadedPolicy, learner: Any, usage: Usage, accelerator: Any, say: Callable[[str], None]
) -> CountedEngine | None:
    """A sampler on the weights that are trained; None where the source samples nothing. `learner`: the wrapped one."""
    if not recipe.source.needs_policy:
        return None
    if is_sharded(learner):
        raise RecipeError(
            f"source '{recipe.source.kind}': sampling from the policy is not possible while its parameters are sharded "
            "(FSDP), since a sampler calls the model outside the wrapped learner. Run data-parallel (DDP) or on one "
            "process, with model.adapter where memory is short."
        )
    sampler: Any = InProcessSampler(policy.model, pad_id=policy.pad_id)
    if recipe.model.sampler.engine == "vllm":
        from statewise.training.rollouts import open_vllm

        sampler = open_vllm(recipe, policy, accelerator, say)
    return CountedEngine(sampler, usage, policy.model, "generated_tokens")


@dataclass(frozen=True)
class ReferenceModel:
    """The policy at step 0: the learner with its adapter disabled, or a frozen copy of the weights."""

    learner: Any
    reads: frozenset[str]
    usage: Usage
    flops_a_token: float

    def attach(self, batch: Batch, name: str) -> Batch:
        """The batch with `<name>_logits` (dense) and, where somebody reads it, the column `<name>_logprobs`."""
        training = self.learner.training
        self.learner.eval()
        dense: Dense = self.learner(batch, mode="reference")
        self.usage.flops += self.flops_a_token * num_tokens(batch)
        self.learner.train(training)
        batch = batch.with_dense(**{f"{name}_logits": dense})
        if f"{name}_logprobs" not in self.reads:
            return batch
        return batch.with_columns(**{f"{name}_logprobs": dense.logprobs(batch)})


def open_policy(recipe: Recipe, path: str | Path | None = None) -> LoadedPolicy:
    """The model to train, in training form; `path`: a checkpoint of this recipe to continue from."""
    settings = recipe.model
    if path is not None:
        settings = replace_model(settings, str(path))
    torch.manual_seed(derive_seed(recipe.seed, "model"))
    policy = load_policy(settings, trainable=True)
    model = policy.model
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if settings.adapter is not None:
            model.enable_input_require_grads()
    freeze_others(model, recipe.optim)
    model.train()
    return policy


def replace_model(settings: Any, path: str) -> Any:
    """Settings that load a checkpoint directory: its own dtype and tokenizer, an adapter when it holds one."""
    dtype = settings.dtype
    if dtype == "auto" and settings.path == "tiny":
        dtype = "float32"
    return settings.model_copy(
        update={"path": path, "gguf_file": None, "revision": None, "dtype": dtype, "adapter": None}
    )


def open_learner(recipe: Recipe, policy: LoadedPolicy) -> Learner:
    """The module that is wrapped; FSDP's wrapping policy finds the model's blocks through it."""
    dtype = torch.float32 if recipe.model.head_dtype == "float32" else None
    if recipe.batch.pack is not None:
        check_packing(policy.model, one_row=recipe.batch.micro_rows == 1)
    learner = Learner(policy.model, recipe.objective, head_dtype=dtype)
    learner._no_split_modules = getattr(policy.model, "_no_split_modules", None)  # type: ignore[assignment]
    return learner


def open_reference(recipe: Recipe, policy: LoadedPolicy, learner: Any, wrapped: Any, device: Any, usage: Usage) -> Any:
    """None where no signal needs it."""
    reads = frozenset(c for t in recipe.objective for p in t.parts for c in p.columns_read())
    reads |= frozenset(c for s in recipe.signal for c in s.columns_read())
    if not any(name.startswith("reference_") for name in reads):
        return None
    if recipe.model.adapter is not None and recipe.model.adapter.path is None:
        return ReferenceModel(wrapped, reads, usage, forward_flops(policy.model))
    frozen = Learner(load_policy(recipe.model).model, recipe.objective, head_dtype=learner.head_dtype)
    frozen.requires_grad_(False)
    return ReferenceModel(frozen.to(device), reads, usage, forward_flops(frozen.model))
