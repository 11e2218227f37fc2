"""The retention ledger: what training gained and what it forgot, a task, with paired intervals.

Definitions of arXiv 2605.22731: forgetting F = base - post; retention ratio post / base; both are averaged over the tasks
of purpose "retention" (the mean of ratios, not the ratio of means). For nats a token, where lower is better, F = post -
base, so that F > 0 is a loss everywhere; such tasks are in no average.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from statewise.errors import DataError
from statewise.evals.results import Record, TaskResult
from statewise.stats.bootstrap import interval_of, resampled_seeds, sign_p_value
from statewise.stats.hypothesis import discordant, holm, mcnemar, paired_t
from statewise.types import derive_seed

RESAMPLES, CONFIDENCE, ALPHA = 4000, 0.95, 0.05
TESTS = {
    "mcnemar": "exact McNemar test",
    "paired_t": "paired t-test",
    "bootstrap": "bootstrap over seeds and items",
}


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; nan where it is undefined."""

    value: float
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class Change:
    """One task after training against the base model, on the same `n` examples of `seeds` runs.

    gained, lost: examples whose score rose and fell (over all seeds). retention: post / base (nan in nats).
    p_value: of no difference, by `test`; p_holm: adjusted over the ledger's target and retention tasks.
    """

    task: str
    purpose: str
    metric: str
    n: int
    seeds: int
    base: float
    post: float
    forgetting: Estimate
    retention: Estimate
    gained: int
    lost: int
    p_value: float
    test: str
    p_holm: float = math.nan

    @property
    def discordant(self) -> float:
        """Share of examples whose score changed."""
        return (self.gained + self.lost) / (self.n * self.seeds)

    @property
    def verdict(self) -> str:
        """In words, at 5 % after Holm's adjustment (a probe: unadjusted)."""
        p = self.p_value if math.isnan(self.p_holm) else self.p_holm
        if not p < ALPHA:
            return "no change seen"
        return "worse" if self.forgetting.value > 0 else "better"


@dataclass(frozen=True)
class Ledger:
    """The changes of a run, or of several that differ in their seed; averages are over its retention tasks."""

    name: str
    seeds: int
    changes: tuple[Change, ...]
    forgetting: Estimate
    retention: Estimate

    def of(self, purpose: str) -> list[Change]:
        """Changes of the tasks of one purpose."""
        return [change for change in self.changes if change.purpose == purpose]

    @property
    def method(self) -> str:
        """How intervals and p-values were made."""
        tests = " and ".join(dict.fromkeys(TESTS[c.test] for c in self.changes))
        family = sum(not math.isnan(c.p_holm) for c in self.changes)
        adjusted = f"; adjusted by Holm over {family} task{'s' * (family != 1)}" if family else ""
        drawn = "examples" if self.seeds == 1 else f"{self.seeds} seeds, then examples (the same for all seeds)"
        return (
            f"F = base - post (nats: post - base). Intervals: 95 %, paired bootstrap over {drawn}, percentile, "
            f"{RESAMPLES} resamples. p: {tests}, two-sided{adjusted}."
        )

    def to_plain(self) -> dict[str, Any]:
        """Nested dicts, as JSON holds them."""
        changes = [{**asdict(c), "discordant": c.discordant, "verdict": c.verdict} for c in self.changes]
        return {**asdict(self), "changes": changes, "method": self.method}


Results = Mapping[str, TaskResult]


def _listed(tasks: set[str]) -> str:
    return ", ".join(sorted(tasks)) or "none"


def make_ledger(
    name: str, pairs: Sequence[tuple[Results, Results]], purposes: Mapping[str, str] | None = None
) -> Ledger:
    """A ledger of (base results, post results), one pair a seed.

    purposes: {task: purpose} where it is not the task's own. Raises DataError where the pairs are not of the same tasks
    and examples.
    """
    tasks = [task for task in pairs[0][1] if all(task in side for pair in pairs for side in pair)]
    if not tasks:
        before, after = ({task for pair in pairs for task in pair[i]} for i in (0, 1))
        raise DataError(
            f"{name}: no task was evaluated both before ({_listed(before)}) and after training ({_listed(after)}). Name the "
            "same ones in eval.tasks; or measure both now with `statewise eval MODEL --task ... --out DIR`, and compare with "
            "`statewise ledger DIR --base DIR_OF_THE_BASE`."
        )
    changes, draws = [], {}
    for task in tasks:
        purpose = (purposes or {}).get(task) or pairs[0][1][task].purpose
        change, draws[task] = _change(task, purpose, [(base[task], post[task]) for base, post in pairs])
        changes.append(change)
    changes = _adjusted(changes)
    averages = [_average(kind, changes, draws) for kind in ("forgetting", "retention")]
    return Ledger(name, len(pairs), tuple(changes), *averages)


def _change(
    task: str, purpose: str, pairs: Sequence[tuple[TaskResult, TaskResult]]
) -> tuple[Change, dict[str, np.ndarray]]:
    """The change of one task, and the resampled forgetting and retention."""
    base_SN, post_SN, weights = matrices(task, pairs)
    better = pairs[0][1].higher_is_better
    means = resampled_seeds(np.stack([base_SN, post_SN]), weights, RESAMPLES, 0, derive_seed(0, "ledger", task))
    base, post = (float((side @ weights).mean() / weights.sum()) for side in (base_SN, post_SN))
    sign = 1.0 if better else -1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        draws = {"forgetting": sign * (means[:, 0] - means[:, 1]), "retention": means[:, 1] / means[:, 0]}
    ratio = post / base if better and base > 0 else math.nan
    p_value, test = _test(base_SN, post_SN, weights, draws["forgetting"])
    gained, lost = discordant(base_SN.ravel(), post_SN.ravel())
    change = Change(
        task,
        purpose,
        pairs[0][1].metric,
        weights.size,
        len(pairs),
        base,
        post,
        Estimate(sign * (base - post), *interval_of(draws["forgetting"], CONFIDENCE)),
        Estimate(ratio, *(interval_of(draws["retention"], CONFIDENCE) if not math.isnan(ratio) else ())),
        gained,
        lost,
        p_value,
        test,
    )
    return change, draws


def matrices(task: str, pairs: Sequence[tuple[TaskResult, TaskResult]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores before and after [S, N] and weights [N], in the order of the first evaluation's examples."""
    sides = [_by_id(task, result.records) for pair in pairs for result in pair]
    ids = list(sides[0])
    for side in sides[1:]:
        if side.keys() != sides[0].keys():
            alone = sorted(map(str, side.keys() ^ sides[0].keys()))
            raise DataError(
                f"task '{task}': received {len(ids)} and {len(side)} examples, of which {len(alone)} have no partner "
                f"{alone[:3]}; expected the same examples in every evaluation. Use the same data, count and limit."
            )
    rows = np.array([[float(side[name]["score"]) for name in ids] for side in sides])
    weights = np.array([float(sides[0][name].get("weight", 1.0)) for name in ids])
    return rows[::2], rows[1::2], weights


def _by_id(task: str, records: Sequence[Record]) -> dict[Any, Record]:
    if not records:
        raise DataError(f"task '{task}': an evaluation holds no records; a paired comparison needs them.")
    return {record["id"]: record for record in records}


def _test(base_SN: np.ndarray, post_SN: np.ndarray, weights: np.ndarray, draws: np.ndarray) -> tuple[float, str]:
    if len(base_SN) > 1:
        return sign_p_value(draws), "bootstrap"
    binary = bool(np.isin(base_SN, (0, 1)).all() and np.isin(post_SN, (0, 1)).all())
    if binary and (weights == weights[0]).all():
        return mcnemar(base_SN[0], post_SN[0]), "mcnemar"
    return paired_t(base_SN[0], post_SN[0], weights), "paired_t"


def _adjusted(changes: Sequence[Change]) -> list[Change]:
    """With Holm's p-values over the target and retention tasks."""
    tested = [c for c in changes if c.purpose != "probe" and not math.isnan(c.p_value)]
    adjusted = dict(zip([c.task for c in tested], holm([c.p_value for c in tested]), strict=True))
    return [replace(c, p_holm=adjusted.get(c.task, math.nan)) for c in changes]


def _average(kind: str, changes: Sequence[Change], draws: Mapping[str, Mapping[str, np.ndarray]]) -> Estimate:
    """The mean of the retention tasks' values, where they have one (no ratio to a base of 0).

    Tasks share the draw of seeds; their examples are drawn apart.
    """
    values = {c.task: getattr(c, kind).value for c in changes if c.purpose == "retention"}
    kept = [task for task, value in values.items() if not math.isnan(value)]
    if not kept:
        return Estimate(math.nan)
    drawn = np.mean([draws[task][kind] for task in kept], axis=0)
    return Estimate(float(np.mean([values[task] for task in kept])), *interval_of(drawn, CONFIDENCE))
