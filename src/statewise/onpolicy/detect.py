"""Whether two data sets differ in on-policyness, whether one is the model's own, and by which statistic they are told apart.

A is the reference: deflection is (E_A x - E_B x)^2 / Var_A x, and AUC the probability that the statistic finds a member of A
more like the model's own than a member of B.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from statewise.errors import RunError
from statewise.files import atomic_write, to_json
from statewise.onpolicy import fingerprint
from statewise.onpolicy.meter import Meter
from statewise.onpolicy.scoring import Scores, is_scores, score
from statewise.onpolicy.settings import Engine
from statewise.onpolicy.verdict import difference_words, drift_words, own_words
from statewise.stats.hypothesis import clustered_ratio
from statewise.stats.martingale import TokenSums, own_test
from statewise.stats.roc import Sums, auc, auc_difference, deflection

DEFAULT_LIMIT = 10_000  # samples of each set: their tokens are held in memory
# {statistic: +1 where the model's own samples have more of it, -1 where less}
SIGNS = {"cll": 1, "log_likelihood": 1, "perplexity": -1, "entropy": -1, "log_rank": -1, "z": 1}
SCALARS = {
    "cll": "mean_phi",
    "log_likelihood": "mean_logprob",
    "perplexity": "perplexity",
    "entropy": "mean_entropy",
    "log_rank": "mean_log_rank",
    "z": "z",
}
SUMS = ("num_tokens", "sum_phi", "sum_square", "sum_varentropy", "sum_square_variance")
LISTS = ("tokens", "positions", "phi", "logprobs", "entropy", "varentropy", "rank")


@dataclass(frozen=True)
class ScoredSet:
    """The first samples of scored data in memory. scalars: {column: [samples]}; lists: {column: array a sample}."""

    name: str
    scores: Scores
    scalars: Mapping[str, np.ndarray]
    lists: Mapping[str, list[np.ndarray]]

    @classmethod
    def load(cls, name: str, scores: Scores, limit: int) -> ScoredSet:
        scalar_names = [*SUMS, *SCALARS.values()]
        scalars: dict[str, list[Any]] = {n: [] for n in scalar_names}
        lists: dict[str, list[np.ndarray]] = {n: [] for n in LISTS}
        for batch in scores.batches(*scalar_names, *LISTS):
            room = limit - len(lists["phi"])
            for column in scalar_names:
                scalars[column].append(batch[column][:room])
            for column in LISTS:
                lists[column] += [v.copy() for v in batch[column][:room]]
            if len(lists["phi"]) >= limit:
                break
        return cls(name, scores, {n: np.concatenate(v).astype(np.float64) for n, v in scalars.items()}, lists)

    @property
    def clusters(self) -> np.ndarray:
        """The sample of each token."""
        return np.repeat(np.arange(len(self.lists["phi"])), [len(x) for x in self.lists["phi"]])

    def tokens(self, statistic: str) -> np.ndarray:
        """The statistic of every token [tokens]."""
        if statistic == "cll":
            return np.concatenate(self.lists["phi"]).astype(np.float64)
        if statistic == "log_rank":
            return np.log1p(np.concatenate(self.lists["rank"]).astype(np.float64))
        if statistic == "entropy":
            return np.concatenate(self.lists["entropy"]).astype(np.float64)
        logprobs = np.concatenate(self.lists["logprobs"]).astype(np.float64)
        return logprobs if statistic == "log_likelihood" else np.exp(np.minimum(-logprobs, 700.0))

    def samples(self, statistic: str) -> np.ndarray:
        """The statistic of every sample [samples]; z is 0 where the model was sure of every token."""
        return np.nan_to_num(self.scalars[SCALARS[statistic]])

    def own(self) -> dict[str, Any]:
        """Size, mean phi with its interval, and the test of own samples."""
        n, phi = self.scalars["num_tokens"], self.scalars["sum_phi"]
        mean, se = clustered_ratio(phi, n)
        sums = TokenSums(int(n.sum()), *(float(self.scalars[c].sum()) for c in SUMS[1:]))
        test = own_test(sums)
        low, high = mean - 1.96 * se, mean + 1.96 * se
        entropy = float(np.concatenate(self.lists["entropy"]).mean(dtype=np.float64))
        temperature = self.scores.settings.temperature
        return {
            "name": self.name,
            "samples": len(n),
            "tokens": int(n.sum()),
            "mean_phi": mean,
            "mean_phi_low": low,
            "mean_phi_high": high,
            "mean_entropy": entropy,
            "mean_varentropy": sums.variance / sums.count,
            "test": vars(test),
            "verdict": own_words(test, mean, low, high, entropy, temperature),
        }


def detect(
    a: str | dict[str, Any],
    b: str | dict[str, Any],
    model: str | dict[str, Any] | None = None,
    *,
    out: str | Path,
    other_model: str | None = None,
    limit: int = DEFAULT_LIMIT,
    engine: Engine | None = None,
    base_dir: str | Path = ".",
    meter: Meter | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Compare two data sets, each given as for `score`, or as a directory that `score` wrote; what is not scored yet goes to
    out/a and out/b. Writes out/detect.json and out/report.html and returns what the first holds.

    other_model: what B was sampled from, at the same temperature; adds the drift that follows from KL(q || p) and the
    entropies. Raises RunError where the two were scored under different models or settings.
    """
    from statewise.onpolicy.detect_page import write_detect_page
    from statewise.onpolicy.drift import known_drift

    Path(out).mkdir(parents=True, exist_ok=True)
    given = {"engine": engine, "base_dir": base_dir, "meter": meter, **settings}
    scored = [_scores(data, model, Path(out) / name, given) for name, data in (("a", a), ("b", b))]
    _check_same(scored[0], scored[1])
    sets = [ScoredSet.load(_name(data), s, limit) for data, s in zip((a, b), scored, strict=True)]
    first, second = (one.own() for one in sets)
    rows = [row for level in ("token", "sequence") for row in _compare(sets[0], sets[1], level)]
    difference = _difference(sets)
    found: dict[str, Any] = {
        "model": scored[0].settings.model.path,
        "temperature": scored[0].settings.temperature,
        "a": first,
        "b": second,
        "difference": difference,
        "statistics": rows,
        "verdict": [first["verdict"], second["verdict"], difference_words(difference, rows)],
    }
    if other_model is not None:
        found["drift"] = known_drift(sets[1], other_model, (engine or Engine()).device, meter or Meter())
        found["verdict"].append(drift_words(found["drift"]))
    write_detect_page(Path(out) / "report.html", found, sets)
    atomic_write(Path(out) / "detect.json", to_json(found, indent=2) + "\n")
    return found


def _scores(data: str | dict[str, Any], model: Any, out: Path, given: Mapping[str, Any]) -> Scores:
    if isinstance(data, str) and is_scores(Path(data)):
        return Scores(data)
    if model is None:
        raise RunError(
            f"{data}: is not scored yet, and no model is named; give --model, or a directory that `score` wrote."
        )
    return score(data, model, out=out, **given)


def _check_same(a: Scores, b: Scores) -> None:
    fields = ("model", "temperature")
    first, second = (
        {f: s.settings.model_dump(mode="json")[f] for f in fields} | {"files": s.model_files} for s in (a, b)
    )
    others = fingerprint.differences(first, second)
    if others:
        raise RunError(
            f"{a.path}, {b.path}: were not scored alike; they differ in {'; '.join(others[:4])}. Score both under one model at "
            "one temperature."
        )


def _name(data: str | dict[str, Any]) -> str:
    return data if isinstance(data, str) else str(data["data"])


def _compare(a: ScoredSet, b: ScoredSet, level: str) -> list[dict[str, Any]]:
    """A row a statistic: means, AUC with its interval and its distance from CLL's, deflection with its interval."""

    def values(statistic: str) -> tuple[np.ndarray, np.ndarray]:
        of = (a.tokens, b.tokens) if level == "token" else (a.samples, b.samples)
        return of[0](statistic), of[1](statistic)

    clusters = (a.clusters, b.clusters) if level == "token" else (None, None)
    reference = values("cll")
    rows = []
    for statistic, sign in SIGNS.items():
        if statistic == "z" and level == "token":
            continue
        x, y = values(statistic)
        gap = auc_difference((sign * x, sign * y), reference, *clusters)
        rows.append(
            {
                "level": level,
                "statistic": statistic,
                "mean_a": float(x.mean()),
                "mean_b": float(y.mean()),
                "auc": auc(sign * x, sign * y, *clusters)._asdict(),
                "auc_less_cll": gap._asdict() if statistic != "cll" else None,
                "snr": deflection(Sums.of(x, clusters[0]), Sums.of(y, clusters[1]))._asdict(),
            }
        )
    return rows


def _difference(sets: list[ScoredSet]) -> dict[str, float]:
    """Mean phi a token of B less that of A, with its 95 % interval and two-sided p-value; samples are the units."""
    (mean_a, se_a), (mean_b, se_b) = (clustered_ratio(s.scalars["sum_phi"], s.scalars["num_tokens"]) for s in sets)
    gap, se = mean_b - mean_a, math.hypot(se_a, se_b)
    p = math.erfc(abs(gap) / se / math.sqrt(2)) if se > 0 else float(gap == 0)
    return {"mean_phi": gap, "low": gap - 1.96 * se, "high": gap + 1.96 * se, "p": p}
