"""Distances between two samples of states, with permutation p-values. Plain arrays in and out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

GRID = (0.25, 0.5, 1.0, 2.0, 4.0)  # bandwidths, in units of the median rule's
MOST_PAIRED = 2000  # states whose distances the median rule looks at


@dataclass(frozen=True)
class Pooled:
    """States of both policies together.

    features [N, D]; is_a [N]; unit [N]: the rollout that a state was cut from; stratum [N]: its prompt.
    """

    features: np.ndarray
    is_a: np.ndarray
    unit: np.ndarray
    stratum: np.ndarray

    def part(self, chosen: np.ndarray) -> Pooled:
        """The states where `chosen`."""
        return Pooled(self.features[chosen], self.is_a[chosen], self.unit[chosen], self.stratum[chosen])

    @cached_property
    def squared(self) -> np.ndarray:
        """[N, N] squared Euclidean distances."""
        norms = (self.features**2).sum(1)
        gaps = norms[:, None] + norms[None] - 2 * self.features @ self.features.T
        np.fill_diagonal(gaps, 0.0)
        return np.maximum(gaps, 0.0)

    def labels(self, permutations: int, seed: int) -> np.ndarray:
        """[1 + P, N] float: the true labels (1 for A), then those of permutations that move whole rollouts inside a prompt.

        If both policies were one, the rollouts of a prompt would be exchangeable; states of one rollout are not.
        """
        random = np.random.default_rng(seed)
        units, first = np.unique(self.unit, return_index=True)
        of_unit = np.searchsorted(units, self.unit)
        truth, strata = self.is_a[first].astype(float), self.stratum[first]
        rows = np.tile(truth, (1 + permutations, 1))
        for stratum in np.unique(strata):
            members = np.flatnonzero(strata == stratum)
            rows[1:, members] = random.permuted(rows[1:, members], axis=1)
        return rows[:, of_unit]


def median_bandwidth(pooled: Pooled) -> float:
    """The median rule: median of |x - y| over pairs of different states of the pool; the mean where that is 0."""
    gaps = pooled.squared[:MOST_PAIRED, :MOST_PAIRED]
    pairs = np.sqrt(gaps[np.triu_indices(len(gaps), 1)])
    return float(np.median(pairs) or pairs.mean()) if pairs.size else 0.0


def mmd(pooled: Pooled, labels: np.ndarray, bandwidth: float) -> tuple[np.ndarray, np.ndarray]:
    """MMD^2 with k(x, y) = exp(-|x - y|^2 / (2 h^2)) under each row of labels: biased (V) and unbiased (U) [R].

    biased = mean k(a, a') + mean k(b, b') - 2 mean k(a, b); the unbiased one leaves out pairs of a state with itself
    (Gretton 2012, eqs. 5 and 3).
    """
    if bandwidth <= 0:
        return np.zeros(len(labels)), np.zeros(len(labels))
    kernel = np.exp(pooled.squared / (-2 * bandwidth**2))
    num_a, n = labels.sum(1), labels.shape[1]
    num_b = n - num_a
    to_a = labels @ kernel
    aa, ab = (to_a * labels).sum(1), (to_a * (1 - labels)).sum(1)
    bb = kernel.sum() - aa - 2 * ab
    cross = 2 * ab / (num_a * num_b)
    biased = aa / num_a**2 + bb / num_b**2 - cross
    with np.errstate(invalid="ignore", divide="ignore"):
        unbiased = (aa - num_a) / (num_a * (num_a - 1)) + (bb - num_b) / (num_b * (num_b - 1)) - cross
    return biased, unbiased


def centroid(pooled: Pooled, labels: np.ndarray) -> np.ndarray:
    """|mean a - mean b| under each row of labels [R]."""
    num_a = labels.sum(1, keepdims=True)
    weights = labels / num_a - (1 - labels) / (labels.shape[1] - num_a)
    return np.linalg.norm(weights @ pooled.features, axis=1)


def sliced_wasserstein(pooled: Pooled, labels: np.ndarray, projections: int = 128, seed: int = 0) -> np.ndarray:
    """Sliced 2-Wasserstein distance (Rabin 2011) under each row of labels [R].

    sqrt(mean over random unit directions u of W2(u a, u b)^2), W2^2 = integral over q in (0, 1) of the squared
    difference of the quantile functions.
    """
    random = np.random.default_rng(seed)
    directions = random.normal(size=(pooled.features.shape[1], projections))
    directions /= np.linalg.norm(directions, axis=0)
    values = pooled.features @ directions
    order = np.argsort(values, axis=0, kind="stable")
    ordered = np.take_along_axis(values, order, 0).T  # [L, N]
    out = []
    for row in labels:
        of_a = row[order].T > 0.5
        num_a = int(row.sum())
        a, b = ordered[of_a].reshape(projections, num_a), ordered[~of_a].reshape(projections, -1)
        out.append(np.sqrt(_squared_w2(a, b).mean()))
    return np.array(out)


def _squared_w2(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """W2^2 of rows of sorted values [L, m] and [L, n]."""
    m, n = a.shape[1], b.shape[1]
    if m == n:
        return ((a - b) ** 2).mean(1)
    # Both quantile functions are constant between these shares.
    ends = np.unique(np.concatenate([np.arange(1, m + 1) * n, np.arange(1, n + 1) * m]))
    widths = np.diff(ends, prepend=0) / (m * n)
    i, j = (ends - 1) // n, (ends - 1) // m
    return ((a[:, i] - b[:, j]) ** 2) @ widths


def jaccard(words: Sequence[frozenset[Hashable]], pooled: Pooled, labels: np.ndarray) -> np.ndarray:
    """Mean over prompts of 1 - |A ∩ B| / |A ∪ B|, A and B the words that each policy's states of the prompt hold [R]."""
    code = {word: 1 << place for place, word in enumerate(sorted({w for s in words for w in s}, key=str))}
    masks = [sum(code[w] for w in held) for held in words]
    members = [np.flatnonzero(pooled.stratum == s) for s in np.unique(pooled.stratum)]
    return np.array([np.mean([_prompt_jaccard(masks, row, m) for m in members]) for row in labels])


def _prompt_jaccard(masks: Sequence[int], labels: np.ndarray, members: np.ndarray) -> float:
    a = b = 0
    for i in members:
        if labels[i] > 0.5:
            a |= masks[i]
        else:
            b |= masks[i]
    union = (a | b).bit_count()
    return 1 - (a & b).bit_count() / union if union else 0.0


@dataclass(frozen=True)
class Tested:
    """A distance, its permutation p-value (1 + hits) / (1 + P), and the permutations' mean and 95 % quantile: its noise."""

    value: float
    p_value: float
    null_mean: float
    null_q95: float


def against_null(values: np.ndarray) -> Tested:
    """Of a distance's values [1 + P], the first under the true labels."""
    truth, null = float(values[0]), values[1:]
    if null.size == 0:
        return Tested(truth, 1.0, float("nan"), float("nan"))
    hits = int((null >= truth - 1e-12 * max(abs(truth), 1.0)).sum())
    return Tested(truth, (1 + hits) / (1 + null.size), float(null.mean()), float(np.quantile(null, 0.95)))


def distances(
    pooled: Pooled, *, permutations: int = 500, projections: int = 128, seed: int = 0, bandwidth: float | None = None
) -> dict[str, Any]:
    """All distances between the two samples, as plain values; the bandwidth is the median rule's unless given."""
    labels = pooled.labels(permutations, seed)
    rule = median_bandwidth(pooled) if bandwidth is None else bandwidth

    def kernel(h: float) -> dict[str, Any]:
        biased, unbiased = mmd(pooled, labels, h)
        told = against_null(biased)
        null = {"null_mean": told.null_mean, "null_q95": told.null_q95}
        return {
            "bandwidth": h,
            "mmd2_biased": told.value,
            "mmd2_unbiased": float(unbiased[0]),
            "p": told.p_value,
            **null,
        }

    others: dict[str, Callable[[], np.ndarray]] = {
        "sliced_wasserstein": lambda: sliced_wasserstein(pooled, labels, projections, seed),
        "centroid": lambda: centroid(pooled, labels),
    }
    grid = [kernel(rule * factor) for factor in GRID] if bandwidth is None else []
    found: dict[str, Any] = {"states": [int(labels[0].sum()), int((1 - labels[0]).sum())]}
    found["mmd"] = grid[GRID.index(1.0)] if grid else kernel(rule)
    if grid:
        found["mmd_grid"] = grid
    return found | {name: vars(against_null(make())) for name, make in others.items()}
