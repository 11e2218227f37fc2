"""A scored data set in numbers, from passes through its file in constant memory."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from statewise.onpolicy.cll import SHARES
from statewise.onpolicy.sketch import Profile, Sketch
from statewise.onpolicy.verdict import own_words
from statewise.stats.martingale import TokenSums, own_test

if TYPE_CHECKING:
    from statewise.onpolicy.scoring import Scores

SHOWN_SAMPLES, SHOWN_PATHS = 20, 8
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
COLUMNS = (
    *("index", "num_tokens", "mean_phi", "sum_phi", "z", "sum_square", "sum_varentropy", "sum_square_variance"),
    *("mean_logprob", "mean_entropy", "mean_log_rank", "min_phi", *SHARES, "phi", "rank"),
)
NUMBERS = {  # of summary.json, in words with their units
    "mean_phi": "mean phi = log p + H, nats a token",
    "std_phi": "standard deviation of phi, nats",
    "min_phi": "lowest phi, nats",
    **{name: f"tokens with phi > {level:g}, share" for name, level in SHARES.items()},
    "share_rank_0": "tokens that are the model's first choice, share",
    "mean_logprob": "mean log p, nats a token",
    "perplexity": "perplexity, exp(-mean log p)",
    "mean_entropy": "mean entropy of the states, nats",
    "mean_varentropy": "mean varentropy of the states, nats^2",
    "mean_log_rank": "mean ln(1 + rank)",
}


class _Totals:
    """Sums over sequences and tokens."""

    def __init__(self) -> None:
        self.samples = 0
        self.tokens = TokenSums()
        self.squares = {name: 0.0 for name in ("ss", "sn", "nn")}
        self.weighted: Counter[str] = Counter()
        self.top = 0
        self.low = math.inf
        self.means = Sketch(-30.0, 10.0, 0.002)
        self.z = Sketch(-100.0, 100.0, 0.05)
        self.phi = Sketch(-40.0, 12.0, 0.05)
        self.profile = Profile()

    def add(self, batch: dict[str, Any]) -> None:
        n, s = batch["num_tokens"].astype(np.float64), batch["sum_phi"]
        self.samples += len(n)
        sums = (batch[k].sum() for k in ("sum_phi", "sum_square", "sum_varentropy", "sum_square_variance"))
        self.tokens += TokenSums(int(n.sum()), *map(float, sums))
        for name, value in (("ss", s @ s), ("sn", s @ n), ("nn", n @ n)):
            self.squares[name] += float(value)
        for name in ("mean_logprob", "mean_entropy", "mean_log_rank", *SHARES):
            self.weighted[name] += float(batch[name] @ n)  # type: ignore[assignment]
        self.top += sum(int((rank == 0).sum()) for rank in batch["rank"])
        self.low = min(self.low, float(batch["min_phi"].min()))
        self.means.add(batch["mean_phi"])
        self.z.add(batch["z"])
        for phi in batch["phi"]:
            self.phi.add(phi)
            self.profile.add(phi)

    def mean_with_interval(self) -> tuple[float, float, float]:
        """Mean phi a token and its 95 % interval; sequences are the units (ratio estimator)."""
        n, count = self.tokens.count, self.samples
        mean = self.tokens.phi / n
        scatter = self.squares["ss"] - 2 * mean * self.squares["sn"] + mean * mean * self.squares["nn"]
        se = math.sqrt(max(0.0, scatter) * count / (count - 1)) / n if count > 1 else math.nan
        return mean, mean - 1.96 * se, mean + 1.96 * se


def summarise_scores(scores: Scores) -> dict[str, Any]:
    """What summary.json holds; a function of the scores, the settings and the rows that were left out."""
    totals = _Totals()
    for batch in scores.batches(*COLUMNS):
        totals.add(batch)
    settings = scores.settings
    mean, low, high = totals.mean_with_interval()
    count = totals.tokens.count
    average = {name: value / count for name, value in totals.weighted.items()}
    test = own_test(totals.tokens)
    return {
        "data": settings.data.data,
        "model": settings.model.path,
        "temperature": settings.temperature,
        "verdict": own_words(test, mean, low, high, average["mean_entropy"], settings.temperature),
        "samples": totals.samples,
        "tokens": count,
        "bad_rows": scores.bad_rows(),
        "mean_phi": mean,
        "mean_phi_low": low,
        "mean_phi_high": high,
        "std_phi": math.sqrt(max(0.0, totals.tokens.square / count - mean * mean)),
        "min_phi": totals.low,
        **{name: average[name] for name in SHARES},
        "mean_logprob": average["mean_logprob"],
        "perplexity": math.exp(min(-average["mean_logprob"], 700.0)),
        "mean_entropy": average["mean_entropy"],
        "mean_varentropy": totals.tokens.variance / count,
        "mean_log_rank": average["mean_log_rank"],
        "share_rank_0": totals.top / count,
        "own_samples": vars(test),
        "sample_mean_phi": {f"{q:g}": totals.means.quantile(q) for q in QUANTILES},
        "sample_z": {f"{q:g}": totals.z.quantile(q) for q in QUANTILES},
        "histogram_mean_phi": _bars(totals.means),
        "histogram_phi": _bars(totals.phi),
        "by_position": totals.profile.rows(),
    }


def _bars(sketch: Sketch) -> dict[str, Any]:
    middles, counts, width = sketch.bars()
    return {"middle": [round(m, 6) for m in middles], "count": counts, "width": width}


def nearest_samples(
    scores: Scores, keys: dict[str, Callable[[np.ndarray], np.ndarray]], most: int
) -> dict[str, list[int]]:
    """For each key(mean_phi) the places in the file of the `most` samples where it is smallest, smallest first."""
    heaps: dict[str, list[tuple[float, int]]] = {name: [] for name in keys}
    place = 0
    for batch in scores.batches("mean_phi"):
        for name, key in keys.items():
            values = key(batch["mean_phi"])
            items = zip((-values).tolist(), range(-place, -place - len(values), -1), strict=True)
            heaps[name] = heapq.nlargest(most, [*heaps[name], *items])
        place += len(batch["mean_phi"])
    return {name: [-at for _, at in heap] for name, heap in heaps.items()}


def fetch(scores: Scores, places: Iterable[int], columns: tuple[str, ...]) -> dict[int, dict[str, Any]]:
    """{place in the file: {column: value}} of some samples."""
    wanted, found, start = sorted(set(places)), {}, 0
    for batch in scores.batches(*columns):
        size = len(batch[columns[0]])
        for place in wanted:
            if start <= place < start + size:
                found[place] = {name: batch[name][place - start] for name in columns}
        start += size
    return found
