"""One step: sample, annotate, batch, denominators, forward and backward, update. No branch on a method."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from statewise.errors import DataError, NonFiniteLoss
from statewise.objective import denominators
from statewise.recipe import Recipe
from statewise.training.budget import Spent
from statewise.training.distributed import gather, total
from statewise.training.drawing import drawn
from statewise.training.hooks import Hook
from statewise.training.metrics import BEHAVIOR_METRICS, StepMetrics
from statewise.training.packing import micro_batches
from statewise.training.received import attached, broken_columns
from statewise.training.usage import Usage
from statewise.types import Batch, Rollout, World, derive_seed


@dataclass
class Training:
    """Everything a step needs; `spent` is the only thing that a step changes besides weights and optimizer."""

    recipe: Recipe
    accelerator: Any
    learner: Any
    optimizer: Any
    world: World
    multiplier: Any
    spent: Spent
    num_examples: int | None
    pad_id: int
    usage: Usage = field(default_factory=Usage)
    hooks: list[Hook] = field(default_factory=list)


def take_step(training: Training) -> dict[str, float]:
    """Run the next step and return its metrics. Raises NonFiniteLoss before the update where the loss is not finite."""
    recipe, spent, started = training.recipe, training.spent, time.perf_counter()
    world = replace(training.world, step=spent.step, progress=_progress(training))
    torch.manual_seed(derive_seed(recipe.seed, "step", spent.step, world.rank))
    if world.sampler is not None:
        world.sampler.load(world.policy, spent.step)
    rollouts, draws, reported = drawn(recipe, spent.step + spent.redraws, world)
    if not rollouts and not recipe.source.needs_policy:
        left = f", or its signals left none: {[s.kind for s in recipe.signal]}" if recipe.signal else ""
        raise DataError(f"source '{recipe.source.kind}' gave no rollouts at step {spent.step}{left}.")
    updates = [
        _update(training, part, world)
        for epoch in range(recipe.batch.epochs)
        for part in _minibatches(rollouts, recipe, spent.step, epoch)
    ]
    row = {**reported, **_of_the_step(updates)}
    spent.step += 1
    spent.redraws += draws - 1
    spent.idle = spent.idle + 1 if not any(updates) else 0
    for hook in training.hooks:
        row |= hook.after_step(spent.step)
    spent.rollouts += len(rollouts)
    seconds = time.perf_counter() - started
    spent.seconds += seconds
    return {"step": spent.step, **row, "total_tokens": spent.tokens, **_used(training), "step_seconds": seconds}


def _used(training: Training) -> dict[str, float]:
    """Adds the step's usage to what is spent; its totals, tokens only where there are any."""
    used, spent = training.usage.take(training.accelerator), training.spent
    spent.generated_tokens += used.generated_tokens
    spent.teacher_tokens += used.teacher_tokens
    spent.flops += used.flops
    tokens = {"total_generated_tokens": spent.generated_tokens, "total_teacher_tokens": spent.teacher_tokens}
    return {**{name: value for name, value in tokens.items() if value}, "total_flops": spent.flops}


def _of_the_step(updates: list[dict[str, float]]) -> dict[str, float]:
    """The last update's metrics, but the first one's of sampler against trainer, before any weight has moved.

    Updates without a token to train are counted.
    """
    taken = [row for row in updates if row]
    empty = {"num_empty_updates": len(updates) - len(taken)} if len(taken) < len(updates) else {}
    if not taken:
        return {"tokens": 0, **empty}
    return {**taken[-1], **{name: v for name, v in taken[0].items() if name in BEHAVIOR_METRICS}, **empty}


def _progress(training: Training) -> float:
    from statewise.training.budget import progress

    return progress(training.spent, training.recipe.budget, training.recipe.batch, training.num_examples)


def _minibatches(rollouts: list[Rollout], recipe: Recipe, step: int, epoch: int) -> list[list[Rollout]]:
    """Whole groups, in a shuffled order of (seed, step, epoch) where there is more than one update."""
    count = recipe.batch.minibatches
    if count * recipe.batch.epochs == 1:
        return [rollouts]
    generator = torch.Generator().manual_seed(derive_seed(recipe.seed, "minibatches", step, epoch))
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    order = torch.randperm(len(groups), generator=generator).tolist()
    listed = list(groups.values())
    cuts = [round(i * len(order) / count) for i in range(count + 1)]
    parts = [[r for g in order[a:b] for r in listed[g]] for a, b in pairwise(cuts)]
    return [part for part in parts if part] or [[]]


def _update(training: Training, rollouts: list[Rollout], world: World) -> dict[str, float]:
    recipe, accelerator = training.recipe, training.accelerator
    settings = recipe.batch
    batches = [
        replace(batch, progress=world.progress, temperature=recipe.source.policy_temperature)
        for batch in micro_batches(
            rollouts,
            pad_id=training.pad_id,
            max_tokens=settings.micro_tokens,
            max_rows=settings.micro_rows,
            pack_length=settings.pack,
            num_ranks=world.num_ranks,
            rank=world.rank,
            keep_groups=any(term.loss.scope == "group" for term in recipe.objective),
        )
    ]
    shares = total(denominators(recipe.objective, batches), accelerator)
    if not any(shares) and recipe.source.needs_policy:
        return {}  # such as a step in which a verifier rejected everything
    if not any(shares):
        raise DataError(
            f"step {training.spent.step}: no token is selected by any term, so there is nothing to train on "
            f"(samples {[r.example.id for r in rollouts[:4]]} ...)."
        )
    training.usage.train(batches, training.accelerator.unwrap_model(training.learner).model)
    metrics = StepMetrics(recipe.objective, recipe.source.part_names)
    training.learner.train()
    for index, batch in enumerate(batches):
        _backward(training, batch, shares, metrics, last=index == len(batches) - 1)
    lr = recipe.optim.lr * training.multiplier(training.spent.step, world.progress)
    norm = _apply(training, lr)
    row = metrics.row(accelerator)
    training.spent.tokens += int(total([float(_trained(batches))], accelerator)[0])
    return {**row, "grad_norm": norm, "lr": lr}


def _trained(batches: Sequence[Batch]) -> int:
    return sum(int(b.action_mask_BT.sum()) for b in batches)


def _backward(training: Training, batch: Batch, shares: list[float], metrics: StepMetrics, *, last: bool) -> None:
    accelerator = training.accelerator
    batch = batch.to(accelerator.device)
    with torch.no_grad():
        for signal in training.recipe.signal:
            batch = attached(signal, signal.attach(batch, training.world), training.world.reads)
    sync = nullcontext() if last or accelerator.num_processes == 1 else accelerator.no_sync(training.learner)
    with sync:
        output = training.learner(batch, shares)
        _finite(training, output, batch)
        # Data-parallel wrappers average gradients over ranks; the denominators are already global, so undo it.
        accelerator.backward(output["loss"] * accelerator.num_processes)
    metrics.add(output)


def _finite(training: Training, output: dict[str, Any], batch: Batch) -> None:
    finite = bool(torch.isfinite(output["loss"].detach()))
    own = None if finite else (list(batch.example_ids), broken_columns(training.recipe, batch))
    found = [flag for flag in gather(own, training.accelerator) if flag]
    if not found:
        return
    columns = list(dict.fromkeys(name for _, broken in found for name in broken))
    causes = "Usual causes: a learning rate that is too high, a broken sample, float16 overflow."
    if columns:
        causes = f"NaN or infinite where it is trained: {', '.join(columns)}."
    raise NonFiniteLoss(
        f"the loss is {float(output['loss'].detach())} at step {training.spent.step}, in a micro-batch of the samples "
        f"{[name for ids, _ in found for name in ids]}; no update was made. The last checkpoint is intact. {causes}"
    )


def _apply(training: Training, lr: float) -> float:
    """Clip, update, and return the gradient norm before clipping."""
    accelerator, optimizer = training.accelerator, training.optimizer
    for group in optimizer.param_groups:
        group["lr"] = lr
    for hook in training.hooks:
        hook.before_update()
    clip = training.recipe.optim.clip_norm
    norm = accelerator.clip_grad_norm_(training.learner.parameters(), clip if clip is not None else float("inf"))
    norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if norm != norm or norm == float("inf"):
        optimizer.zero_grad(set_to_none=True)
        raise NonFiniteLoss(f"the gradient norm is {norm} at step {training.spent.step}; no update was made.")
    optimizer.step()
    for hook in training.hooks:
        hook.after_update()
    optimizer.zero_grad(set_to_none=True)
    return norm
