"""Where the predictions of two policies differ: KL at single states, and how reachable training states are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from statewise.drift.states import DriftPrompt, Visit
from statewise.evals.states import TaskText
from statewise.models.pair import COLUMNS, PairScorer
from statewise.stats.hypothesis import clustered_se
from statewise.types import Rollout

Row = dict[str, Any]
RARE = math.log(0.01)  # a training token below 1 %


def visited(pair: PairScorer, prompts: Sequence[DriftPrompt], visits: Sequence[Visit], where: str) -> list[Row]:
    """A row for every state of the completions."""
    sequences = [[*prompts[v.prompt].tokens, *v.tokens] for v in visits]
    starts = [len(prompts[v.prompt].tokens) for v in visits]
    names = [(prompts[v.prompt].source, f"{prompts[v.prompt].id}#{v.rollout}") for v in visits]
    places = [list(range(s, len(x))) for s, x in zip(starts, sequences, strict=True)]
    return _rows(pair, where, names, sequences, places, starts)


def at_tasks(pair: PairScorer, texts: Mapping[str, Sequence[TaskText]]) -> list[Row]:
    """Rows of "retention_prompt" (every state inside what is asked) and "retention_answer" (states of the right answer)."""
    found: list[Row] = []
    for task, examples in texts.items():
        names = [(task, example.id) for example in examples]
        sequences = [[*e.prompt, *e.answer] for e in examples]
        asked = [list(range(1, len(e.prompt))) for e in examples]
        answered = [list(range(len(e.prompt), len(e.prompt) + len(e.answer))) for e in examples]
        found += _rows(pair, "retention_prompt", names, sequences, asked, [1] * len(examples))
        found += _rows(pair, "retention_answer", names, sequences, answered, [len(e.prompt) for e in examples])
    return found


def trained(pair: PairScorer, rollouts: Sequence[Rollout]) -> list[Row]:
    """Rows of "training": the states whose tokens were trained, with `prefix_logprob_a`, log pi_A(y_<t | x) in nats."""
    sequences = [rollout.tokens() for rollout in rollouts]
    starts, places = [], []
    for rollout in rollouts:
        first = next((i for i, s in enumerate(rollout.segments) if s.author not in ("prompt", "environment")), 0)
        start = max(1, sum(len(s.tokens) for s in rollout.segments[:first]))
        starts.append(start)
        places.append(list(range(start, rollout.num_tokens)))
    names = [(_author(rollout), rollout.example.id) for rollout in rollouts]
    rows = _rows(pair, "training", names, sequences, places, starts)
    kept, position = [], 0
    for rollout, own in zip(rollouts, places, strict=True):
        is_trained = [s.train for s in rollout.segments for _ in s.tokens]
        total = 0.0
        for t in own:
            row = rows[position]
            if is_trained[t]:
                kept.append({**row, "prefix_logprob_a": total})
            total += row["logprob_a"]
            position += 1
    return kept


def _author(rollout: Rollout) -> str:
    return next((s.author for s in rollout.segments if s.train), "dataset")


def _rows(
    pair: PairScorer,
    where: str,
    names: Sequence[tuple[str, str]],
    sequences: Sequence[Sequence[int]],
    places: Sequence[Sequence[int]],
    starts: Sequence[int],
) -> list[Row]:
    """t: tokens of the state after `start`, where the completion begins."""
    found = pair.compare(sequences, places)
    return [
        {
            "where": where,
            "source": source,
            "id": name,
            "t": t - start,
            "share": (t - start) / max(len(sequence) - start, 1),
            **{column: getattr(values, column)[i] for column in COLUMNS},
        }
        for (source, name), sequence, own, start, values in zip(names, sequences, places, starts, found, strict=True)
        for i, t in enumerate(own)
    ]


def summary(rows: Sequence[Row], positions: int) -> dict[str, Any]:
    """KL in both directions at each kind of state: its mean with a standard error by sequences, by source and position."""
    found: dict[str, Any] = {}
    for where in dict.fromkeys(row["where"] for row in rows):
        own = [row for row in rows if row["where"] == where]
        sources = list(dict.fromkeys(row["source"] for row in own))
        found[where] = {
            **_means(own),
            "by_source": {name: _means([r for r in own if r["source"] == name]) for name in sources},
            "by_position": [_means([r for r in own if int(r["share"] * positions) == j]) for j in range(positions)],
        }
    return found


def _means(rows: Sequence[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {"states": len(rows)}
    clusters = [f"{row['source']} {row['id']}" for row in rows]
    for column in ("kl_ab", "kl_ba"):
        values = [row[column] for row in rows]
        found[column] = float(np.mean(values)) if rows else None
        found[f"{column}_se"] = clustered_se(values, clusters) if rows else None
    return found


def reachability(rows: Sequence[Row]) -> dict[str, Any]:
    """How near policy A, the learner before training, is to the states and tokens that it was trained on.

    logprob: mean log pi(y_t | s_t), nats a token; phi: mean of log pi(y_t | s_t) + H(s_t); prefix_logprob: mean over
    states of log pi(y_<t | x), nats; rare_share: tokens with pi < 0.01. `*_after`: of policy B.
    """
    own = [row for row in rows if row["where"] == "training"]
    if not own:
        return {}
    a, b = (np.array([row[f"logprob_{x}"] for row in own]) for x in "ab")
    h_a, h_b = (np.array([row[f"entropy_{x}"] for row in own]) for x in "ab")
    return {
        "tokens": len(own),
        "logprob": float(a.mean()),
        "phi": float((a + h_a).mean()),
        "prefix_logprob": float(np.mean([row["prefix_logprob_a"] for row in own])),
        "rare_share": float((a < RARE).mean()),
        "logprob_after": float(b.mean()),
        "phi_after": float((b + h_b).mean()),
    }
