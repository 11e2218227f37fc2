"""States that a policy visits on fixed prompts: rollouts, and prefixes cut from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from statewise.types import Sampling, derive_seed


@dataclass(frozen=True)
class DriftPrompt:
    """A fixed prompt: its ids, and which set it is from."""

    id: str
    source: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Visit:
    """A rollout of prompt number `prompt`; `cuts`: lengths of its sampled prefixes, one in each equal part of it."""

    prompt: int
    rollout: int
    tokens: tuple[int, ...]
    cuts: tuple[int, ...]


def visit(
    policy: Any,
    prompts: Sequence[DriftPrompt],
    *,
    who: str,
    rollouts: int,
    positions: int,
    max_tokens: int,
    temperature: float,
    seed: int,
    batch_tokens: int | None = None,
) -> list[Visit]:
    """`rollouts` completions a prompt by a LoadedPolicy, with `positions` prefixes each.

    Prefix j of a completion of T tokens has floor((j + u) T / positions) of them, u uniform: together they are a
    stratified sample of its T states (state visitation d(s) = E (1/T) sum_t 1{s_t = s}); the first has none or few tokens.
    who: names the random stream, so that two policies are sampled independently.
    """
    from statewise.models.generate import InProcessSampler

    sampler = InProcessSampler(policy.model, pad_id=policy.pad_id, batch_tokens=batch_tokens)
    sampling = Sampling(max_tokens, temperature, stop_ids=policy.stop_ids, seed=derive_seed(seed, "drift", who))
    starts = [prompt.tokens for prompt in prompts for _ in range(rollouts)]
    found = []
    for index, completion in enumerate(sampler.generate(starts, sampling)):
        random = np.random.default_rng(derive_seed(seed, "drift", who, "cuts", index))
        shares = (np.arange(positions) + random.random(positions)) / positions
        cuts = tuple(int(share * len(completion.tokens)) for share in shares)
        found.append(Visit(index // rollouts, index % rollouts, completion.tokens, cuts))
    return found


def fixed_prompts(policy: Any, sources: Sequence[dict[str, Any]], seed: int = 0) -> list[DriftPrompt]:
    """The prompts of data sets, each named by the settings of a source `policy` (data, count, split, columns ...).

    Their `source` is the data's name. Raises the errors of reading data.
    """
    from pathlib import Path

    from statewise.component import parse
    from statewise.types import World

    world = World(tokenizer=policy.tokenizer, seed=seed)
    found = []
    for settings in sources:
        count = settings.get("limit") or settings.get("count")
        source: Any = parse("source", {"kind": "policy", "max_tokens": 1, **settings}, "prompts")
        name = settings["data"] if settings["data"].startswith("tiny:") else Path(settings["data"]).stem
        made = source.prompts(world)[:count]
        found += [DriftPrompt(prompt.example.id, name, prompt.tokens) for prompt in made]
    return found
