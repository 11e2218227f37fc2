"""The drift of phi where the model that wrote the text is known.

    E_{x ~ q}[phi] = H(p) - H(q) - KL(q || p)

in every state, with p the model that scores and q the one that wrote: below 0 only where KL(q || p) > H(p) - H(q).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from statewise.errors import RunError
from statewise.models.head import FullLogits, Projection
from statewise.models.onepass import chunk_rows
from statewise.onpolicy.chunks import ChunkScorer
from statewise.onpolicy.meter import Meter
from statewise.onpolicy.settings import Engine, ScoreSettings
from statewise.settings import ModelSettings
from statewise.stats.hypothesis import clustered_ratio
from statewise.stats.martingale import TokenSums, own_test
from statewise.training.opened import check_vocabulary

if TYPE_CHECKING:
    from statewise.onpolicy.detect import ScoredSet

Rows = Projection | FullLogits


@torch.no_grad()
def pair_statistics(p: Rows, q: Rows, targets_N: torch.Tensor, temperature: float = 1.0) -> dict[str, np.ndarray]:
    """{name: [N]} of KL(q || p), H(p), H(q), phi under p, and phi, varentropy, fourth of the targets under q.

    Over the ids that both have; both logits are divided by `temperature`.
    """
    parts: list[dict[str, torch.Tensor]] = []
    size = min(p.num_tokens, q.num_tokens)
    step = chunk_rows(size, p.device) // 4 or 1
    for start in range(0, p.num_rows, step):
        part = slice(start, min(start + step, p.num_rows))
        log_p, log_q = (
            (r.logits(part, torch.float32)[:, :size] / temperature).double().log_softmax(-1) for r in (p, q)
        )
        targets = targets_N[part, None]
        prob_p, prob_q = log_p.exp(), log_q.exp()
        entropy_p, entropy_q = -(prob_p * log_p).sum(-1), -(prob_q * log_q).sum(-1)
        centred = (log_q + entropy_q[:, None]).square()
        parts.append(
            {
                "kl": (prob_q * (log_q - log_p)).sum(-1),
                "entropy_p": entropy_p,
                "entropy_q": entropy_q,
                "phi": log_p.gather(-1, targets)[:, 0] + entropy_p,
                "phi_q": log_q.gather(-1, targets)[:, 0] + entropy_q,
                "varentropy_q": (prob_q * centred).sum(-1),
                "fourth_q": (prob_q * centred.square()).sum(-1),
            }
        )
    return {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}


def known_drift(b: ScoredSet, other_model: str, device: str | None, meter: Meter) -> dict[str, Any]:
    """Means a token over B's states, {"mean", "low", "high"} each: `kl`, `entropy_gap` = H(q) - H(p), `expected_phi` =
    -(kl + entropy_gap), and the `mean_phi` seen; `own_of_other`: the test of B as the other model's own samples.

    Raises RecipeError where the other model has another vocabulary.
    """
    settings = b.scores.settings
    engine = Engine(device=device)
    policy = ChunkScorer(settings, engine)
    other = ChunkScorer(settings.model_copy(update={"model": _like(settings, other_model)}), engine)
    check_vocabulary(policy.policy, other.policy)
    sequences, positions = b.lists["tokens"], b.lists["positions"]
    found: dict[int, dict[str, np.ndarray]] = {}
    meter.start(len(sequences))
    for group in policy.scorer.groups([s.tolist() for s in sequences]):
        ids, masks = [sequences[i].tolist() for i in group], [_mask(sequences[i], positions[i]) for i in group]
        p, targets = policy.scorer.states(ids, masks)
        q, _ = other.scorer.states(ids, masks)
        values = pair_statistics(p, q, targets, settings.temperature)
        stops = np.cumsum([len(positions[i]) for i in group])[:-1]
        lists = {name: np.split(value, stops) for name, value in values.items()}
        found |= {index: {name: v[row] for name, v in lists.items()} for row, index in enumerate(group)}
        meter.tokens(sum(map(len, ids)))
        meter.rows(len(group))
    meter.stop()
    return _means([found[i] for i in range(len(sequences))], other_model)


def _like(settings: ScoreSettings, path: str) -> ModelSettings:
    return settings.model.model_copy(update={"path": path, "adapter": None, "revision": None, "gguf_file": None})


def _mask(tokens: np.ndarray, positions: np.ndarray) -> list[bool]:
    mask = np.zeros(len(tokens), dtype=bool)
    mask[positions] = True
    return mask.tolist()


def _means(samples: Sequence[dict[str, np.ndarray]], other_model: str) -> dict[str, Any]:
    counts = [len(s["kl"]) for s in samples]
    if not counts:
        raise RunError("drift: there is no sample.")

    def mean(values: Sequence[np.ndarray]) -> dict[str, float]:
        value, se = clustered_ratio([float(v.sum()) for v in values], counts)
        return {"mean": value, "low": value - 1.96 * se, "high": value + 1.96 * se}

    joined = {name: np.concatenate([s[name] for s in samples]) for name in ("phi_q", "varentropy_q", "fourth_q")}
    test = own_test(TokenSums.of(joined["phi_q"], joined["varentropy_q"], joined["fourth_q"]))
    return {
        "other_model": other_model,
        "kl": mean([s["kl"] for s in samples]),
        "entropy_gap": mean([s["entropy_q"] - s["entropy_p"] for s in samples]),
        "expected_phi": mean([s["entropy_p"] - s["entropy_q"] - s["kl"] for s in samples]),
        "mean_phi": mean([s["phi"] for s in samples]),
        "own_of_other": vars(test),
    }
