"""The centred log-likelihood of tokens, and what a sequence of them adds up to.

    phi_t = log p(y_t | s_t) + H[p(. | s_t)]        nats; 0 on average where y_t is drawn from p

Source: arXiv 2602.12222.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from statewise.errors import StatewiseError
from statewise.stats.martingale import TokenSums

STATISTICS = ("logprobs", "entropy", "varentropy", "fourth", "rank")
SHARES = {"share_above_0": 0.0, "share_above_minus_1": -1.0, "share_above_minus_3": -3.0, "share_above_minus_5": -5.0}


class MaskedScorer(Protocol):
    """What `InProcessScorer` can do: statistics at the tokens where a mask is true."""

    def score_at(
        self,
        sequences: Sequence[Sequence[int]],
        masks: Sequence[Sequence[bool]],
        needs: Sequence[str] = ...,
        *,
        temperature: float = ...,
        report: Callable[[int], None] = ...,
    ) -> list[dict[str, np.ndarray]]: ...


@dataclass(frozen=True)
class TokenStatistics:
    """Of the n scored tokens of a sequence, arrays [n].

    positions int32, of the tokens in the sequence; logprobs, entropy (nats), varentropy sum p (log p + H)^2 and fourth
    sum p (log p + H)^4 float32; rank int32, how many tokens are more probable.
    """

    positions: np.ndarray
    logprobs: np.ndarray
    entropy: np.ndarray
    varentropy: np.ndarray
    fourth: np.ndarray
    rank: np.ndarray

    @property
    def phi(self) -> np.ndarray:
        """log p + H (nats)"""
        phi: np.ndarray = self.logprobs + self.entropy
        return phi

    def __len__(self) -> int:
        return len(self.positions)


def score_tokens(
    scorer: MaskedScorer, tokens: Sequence[int], mask: Sequence[bool], *, temperature: float = 1.0
) -> TokenStatistics:
    """Statistics of the tokens of one sequence where the mask is true (never the first: it has no state)."""
    return score_sequences(scorer, [tokens], [mask], temperature=temperature)[0]


def score_sequences(
    scorer: MaskedScorer,
    sequences: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]],
    *,
    temperature: float = 1.0,
    report: Callable[[int], None] = lambda tokens: None,
) -> list[TokenStatistics]:
    """As `score_tokens`, for many sequences at once; logits are divided by `temperature` before all statistics.

    report(tokens) is called after each forward pass. Raises StatewiseError where the model's statistics are not finite.
    """
    found = scorer.score_at(sequences, masks, STATISTICS, temperature=temperature, report=report)
    results = []
    for index, (mask, values) in enumerate(zip(masks, found, strict=True)):
        positions = np.flatnonzero(np.asarray(mask, dtype=bool)).astype(np.int32)
        made = TokenStatistics(positions, *(_as(name, values) for name in STATISTICS))
        if not (np.isfinite(made.phi).all() and np.isfinite(made.fourth).all()):
            raise StatewiseError(
                f"sequence {index}: log p, H or its moments are not finite. The model's weights are broken, or its dtype "
                'is too narrow: try dtype = "float32".'
            )
        results.append(made)
    return results


def _as(name: str, values: dict[str, Any]) -> np.ndarray:
    found = values.get(name, np.zeros(0))
    return found.astype(np.int32 if name == "rank" else np.float32, copy=False)


def summarise(tokens: TokenStatistics) -> dict[str, float]:
    """The record of a sequence: sums and means in float64 of its tokens' float32 values.

    num_tokens; mean_phi, sum_phi, min_phi (nats); share_above_*: of the tokens with phi > 0, -1, -3, -5;
    z = sum phi / sqrt(sum varentropy), standard normal where the tokens are the model's own (nan where that is 0);
    sum_square, sum_varentropy, sum_square_variance: of phi^2, V and F - V^2 (see `stats.martingale`);
    mean_logprob, mean_entropy, mean_log_rank = mean ln(1 + rank); perplexity = exp(-mean log p).
    """
    phi, count = tokens.phi.astype(np.float64), len(tokens)
    sums = TokenSums.of(phi, tokens.varentropy, tokens.fourth)
    total, variance = sums.phi, sums.variance
    mean_logprob = _mean(tokens.logprobs)
    return {
        "num_tokens": count,
        "mean_phi": total / count if count else math.nan,
        "sum_phi": total,
        "min_phi": float(phi.min()) if count else math.nan,
        **{name: float((phi > level).mean()) if count else math.nan for name, level in SHARES.items()},
        "z": total / math.sqrt(variance) if variance > 0 else math.nan,
        "sum_square": sums.square,
        "sum_varentropy": variance,
        "sum_square_variance": sums.square_variance,
        "mean_logprob": mean_logprob,
        "mean_entropy": _mean(tokens.entropy),
        "mean_log_rank": _mean(np.log1p(tokens.rank)),
        "perplexity": math.exp(min(-mean_logprob, 700.0)) if count else math.nan,
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean(dtype=np.float64)) if len(values) else math.nan
