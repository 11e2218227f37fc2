"""How far a teacher is from the policy at the first tokens of what the policy writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from statewise.losses.divergence import coarsen, kl, shared_vocabulary
from statewise.models.load import stop_ids
from statewise.training.learner import Learner
from statewise.training.packing import collate
from statewise.types import Example, Rollout, Sampling, Segment, World


def kl_profile(world: World, teacher: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[float]:
    """Mean over prompts of KL(policy, teacher), in nats, at the first, second ... token of completions that the policy samples.

    Of a teacher that gives its most probable tokens only, over those and one bucket; empty where it gives none.
    """
    if not teacher.profiles:
        return []
    assert world.sampler is not None
    sampling = Sampling(max_tokens, stop_ids=stop_ids(world.policy, world.tokenizer), seed=world.seed)
    completions = world.sampler.generate(prompts, sampling)
    rollouts = [
        Rollout((Segment(tuple(p), "prompt"), Segment(c.tokens, "policy", True)), Example(str(i)))
        for i, (p, c) in enumerate(zip(prompts, completions, strict=True))
    ]
    batch = collate(rollouts, 0).to(world.device)
    at = batch.action_mask_BT[:, 1:].nonzero(as_tuple=True)
    with torch.no_grad():
        ours = Learner(world.policy, [])(batch, mode="dense").take(at).logits(slice(None))
        rows = teacher.dense(batch).take(at)
        ours, theirs = shared_vocabulary(ours, rows.logits(slice(None)))
    if not getattr(rows, "whole", True):
        ours, theirs = coarsen(ours, rows.ids_NK), coarsen(theirs, rows.ids_NK)
    values = kl(ours, theirs)
    starts = torch.tensor([len(p) for p in prompts], device=values.device)
    place = at[1] + 1 - starts[at[0]]
    return [float(values[place == index].mean()) for index in range(int(place.max()) + 1)]
