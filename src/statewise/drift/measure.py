"""All drift measures between two policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from statewise.drift.distances import Pooled, against_null, distances, jaccard
from statewise.drift.features import hidden, scaled, scaled_lexical, words
from statewise.drift.states import DriftPrompt, Visit, visit
from statewise.drift.where import Row, at_tasks, reachability, summary, trained, visited
from statewise.errors import RecipeError
from statewise.evals.states import TaskText
from statewise.models.pair import PairScorer
from statewise.types import Rollout


@dataclass(frozen=True)
class DriftSettings:
    """rollouts: a prompt and policy; positions: prefixes a rollout; temperature: of the rollouts (0: greedy)."""

    rollouts: int = 2
    positions: int = 4
    max_tokens: int = 128
    temperature: float = 1.0
    features: tuple[str, ...] = ("lexical", "hidden")
    permutations: int = 500
    projections: int = 128
    seed: int = 0
    batch_tokens: int = 8192


@dataclass(frozen=True)
class Drift:
    """`result`: everything as plain values; `rows`: one a state that KL was measured at."""

    result: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    @property
    def measures(self) -> dict[str, float]:
        """One number a measure, by name, for ranking runs."""
        return dict(self.result["measures"])


def measure_drift(
    a: Any,
    b: Any,
    prompts: Sequence[DriftPrompt],
    settings: DriftSettings | None = None,
    *,
    encoder: Any = None,
    retention: Mapping[str, Sequence[TaskText]] | None = None,
    training: Sequence[Rollout] = (),
    visits_a: Sequence[Visit] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Drift:
    """Drift from policy A (before) to policy B (after), both LoadedPolicy with one vocabulary.

    encoder: a LoadedPolicy whose hidden states are the features of both (default: A). retention: {task: its examples}.
    training: rollouts that B was trained on. visits_a: what `visit` gave for A with these prompts and settings.
    Raises RecipeError for another vocabulary and without prompts.
    """
    settings = settings or DriftSettings()
    if not prompts:
        raise RecipeError("drift: received no prompt; name a data set with --prompts.")
    _check_same_tokens(a, b)
    tell(f"sampling {settings.rollouts} rollouts of {len(prompts)} prompts from each policy")
    by_a = visits_a if visits_a is not None else visits_of(a, prompts, settings, "a")
    by_b = visits_of(b, prompts, settings, "b")
    found: dict[str, Any] = {"settings": {**asdict(settings), "prompts": len(prompts)}, "features": {}}
    for name in settings.features:
        tell(f"distances of {name} features")
        pooled = _pooled(name, a, encoder or a, prompts, by_a, by_b, settings)
        found["features"][name] = _by_part(pooled, prompts, by_a, by_b, settings)
    found["jaccard"] = _jaccard(a, prompts, by_a, by_b, settings)
    tell("KL at single states")
    pair = PairScorer(a.model, b.model, pad_id=a.pad_id, batch_tokens=settings.batch_tokens)
    rows = visited(pair, prompts, by_a, "before_states") + visited(pair, prompts, by_b, "own_states")
    rows += at_tasks(pair, retention or {}) + trained(pair, training)
    found["kl"] = summary(rows, settings.positions)
    found["reachability"] = reachability(rows)
    found["measures"] = flat(found)
    return Drift(found, rows)


def visits_of(policy: Any, prompts: Sequence[DriftPrompt], settings: DriftSettings, who: str) -> list[Visit]:
    """The states of one side: "a" or "b", which are sampled independently."""
    return visit(
        policy,
        prompts,
        who=who,
        rollouts=settings.rollouts,
        positions=settings.positions,
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        seed=settings.seed,
    )


def _check_same_tokens(a: Any, b: Any) -> None:
    from statewise.training.opened import check_vocabulary

    try:
        check_vocabulary(a, b)
    except RecipeError:
        raise RecipeError(
            f"drift: '{b.path}' has other tokens than '{a.path}', so their states and probabilities can't be compared; "
            "expected two policies with one tokenizer, up to padding."
        ) from None


def _pooled(
    name: str,
    a: Any,
    encoder: Any,
    prompts: Sequence[DriftPrompt],
    by_a: Sequence[Visit],
    by_b: Sequence[Visit],
    settings: DriftSettings,
) -> Pooled:
    every = [*by_a, *by_b]
    if name == "lexical":
        features = scaled_lexical(_texts(a, every))
    elif name == "hidden":
        sequences = [[*prompts[v.prompt].tokens, *v.tokens] for v in every]
        at = [[len(prompts[v.prompt].tokens) + cut for cut in v.cuts] for v in every]
        raw = hidden(encoder.model, sequences, at, pad_id=encoder.pad_id, batch_tokens=settings.batch_tokens)
        features = scaled(raw, (raw.shape[1],))
    else:
        raise RecipeError(f"drift: unknown features '{name}'; expected lexical or hidden.")
    return _pool(features, by_a, by_b, settings.positions)


def _pool(features: np.ndarray, by_a: Sequence[Visit], by_b: Sequence[Visit], positions: int) -> Pooled:
    every = [*by_a, *by_b]
    is_a = np.repeat([True] * len(by_a) + [False] * len(by_b), positions)
    unit = np.repeat(np.arange(len(every)), positions)
    return Pooled(features, is_a, unit, np.repeat([v.prompt for v in every], positions))


def _texts(policy: Any, visits: Sequence[Visit]) -> list[str]:
    """The text of each prefix, without special tokens."""
    cut = [list(v.tokens[:n]) for v in visits for n in v.cuts]
    return [policy.tokenizer.decode(ids, skip_special_tokens=True) if ids else "" for ids in cut]


def _by_part(
    pooled: Pooled,
    prompts: Sequence[DriftPrompt],
    by_a: Sequence[Visit],
    by_b: Sequence[Visit],
    settings: DriftSettings,
) -> dict[str, Any]:
    """Over all states, and by source and by position in the rollout, with the bandwidth of all."""
    how = {"permutations": settings.permutations, "projections": settings.projections, "seed": settings.seed}
    found = distances(pooled, **how)
    bandwidth = found["mmd"]["bandwidth"]
    sources = np.repeat([prompts[v.prompt].source for v in (*by_a, *by_b)], settings.positions)
    position = np.tile(np.arange(settings.positions), len(by_a) + len(by_b))
    parts = {
        "by_source": {str(s): sources == s for s in dict.fromkeys(sources)},
        "by_position": {str(j): position == j for j in range(settings.positions)},
    }
    for kind, masks in parts.items():
        if len(masks) > 1:
            found[kind] = {
                name: distances(pooled.part(mask), bandwidth=bandwidth, **how) for name, mask in masks.items()
            }
    return found


def _jaccard(
    a: Any, prompts: Sequence[DriftPrompt], by_a: Sequence[Visit], by_b: Sequence[Visit], settings: DriftSettings
) -> dict[str, Any]:
    held = [frozenset(words(text)) for text in _texts(a, [*by_a, *by_b])]
    pooled = _pool(np.zeros((len(held), 1)), by_a, by_b, settings.positions)
    return vars(against_null(jaccard(held, pooled, pooled.labels(settings.permutations, settings.seed))))


def flat(found: Mapping[str, Any]) -> dict[str, float]:
    """{measure: number}: distances of states, KL by kind of state, reachability."""
    measures: dict[str, float] = {}
    for name, told in found["features"].items():
        measures[f"{name}_mmd2"] = told["mmd"]["mmd2_biased"]
        measures[f"{name}_mmd2_unbiased"] = told["mmd"]["mmd2_unbiased"]
        measures[f"{name}_sliced_wasserstein"] = told["sliced_wasserstein"]["value"]
        measures[f"{name}_centroid"] = told["centroid"]["value"]
    measures["jaccard"] = found["jaccard"]["value"]
    for where, told in found["kl"].items():
        for direction in ("kl_ab", "kl_ba"):
            if told[direction] is not None:
                measures[f"{direction}_{where}"] = told[direction]
    reach = found["reachability"]
    return measures | {
        f"training_{name}": reach[name] for name in ("logprob", "phi", "prefix_logprob", "rare_share") if reach
    }
