"""The page of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from statewise.estimates import interval
from statewise.onpolicy import figures
from statewise.onpolicy.sketch import Profile
from statewise.onpolicy.summary import SHOWN_PATHS
from statewise.onpolicy.verdict import NAMES
from statewise.report.page import Block, Cell, Figure, Paragraph, Section, Table, write_page

if TYPE_CHECKING:
    from statewise.onpolicy.detect import ScoredSet


BINS = 60


def write_detect_page(path: Path, found: Mapping[str, Any], sets: Sequence[ScoredSet]) -> None:
    """report.html of `detect`."""
    names = _names(found)
    sections = [
        Section("Are they the model's own", [_own_table(found, names)]),
        Section("Statistics", _statistics(found)),
        Section("Distribution", _distribution(sets, names)),
    ]
    if "drift" in found:
        sections.insert(1, Section("Drift", [_drift_table(found["drift"])]))
    title = f"{names[0]} and {names[1]} under {found['model']}"
    write_page(path, title, "\n\n".join(_labelled(found["verdict"])), sections)


def _labelled(verdict: Sequence[str]) -> list[str]:
    return [f"{letter}. {text}" if letter else text for letter, text in zip(("A", "B", "", ""), verdict, strict=False)]


def _names(found: Mapping[str, Any]) -> list[str]:
    return [f"{letter}: {Path(found[letter.lower()]['name']).name or found[letter.lower()]['name']}" for letter in "AB"]


def _own_table(found: Mapping[str, Any], names: Sequence[str]) -> Table:
    columns = [
        "set",
        "samples",
        "tokens",
        "mean phi [95 %]",
        "z",
        "p (mean)",
        "variance ratio",
        "p (variance)",
        "found drift",
    ]
    rows: list[list[Any]] = []
    for name, letter in zip(names, "ab", strict=True):
        one = found[letter]
        mean = {"value": one["mean_phi"], "low": one["mean_phi_low"], "high": one["mean_phi_high"]}
        numbers = [one["test"][k] for k in ("z", "p_mean", "variance_ratio", "p_variance", "detectable")]
        rows.append([name, one["samples"], one["tokens"], _interval(mean), *numbers])
    return Table(
        columns,
        rows,
        "The model's own samples have mean phi 0, and the variance of phi is the model's varentropy. Found drift: the mean phi "
        "that the test finds four times in five.",
    )


def _drift_table(drift: Mapping[str, Any]) -> Table:
    texts = {
        "kl": "KL(q || p)",
        "entropy_gap": "H(q) - H(p)",
        "expected_phi": "-(KL + H(q) - H(p)): mean phi of samples of q",
        "mean_phi": "mean phi of B",
    }
    rows = [[text, _interval({**drift[k], "value": drift[k]["mean"]})] for k, text in texts.items()]
    return Table(
        ["nats a token, in B's states", "mean [95 %]"], rows, f"q is {drift['other_model']}, p the model that scores"
    )


def _statistics(found: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    columns = ["statistic", "mean of A", "mean of B", "AUC [95 %]", "AUC less CLL's [95 %]", "SNR [95 %]"]
    for level in ("token", "sequence"):
        rows = [
            [
                *(NAMES[row["statistic"]], row["mean_a"], row["mean_b"]),
                *(_interval(row["auc"]), _interval(row["auc_less_cll"]), _interval(row["snr"])),
            ]
            for row in found["statistics"]
            if row["level"] == level
        ]
        blocks.append(Table(columns, rows, f"One {level}"))
    blocks.append(
        Paragraph(
            "AUC: how often the statistic finds a member of A more like the model's own than one of B (log-likelihood and phi "
            "higher, the others lower). SNR: (mean A - mean B)^2 / variance in A. Intervals of single tokens take samples as "
            "the units.",
            "note",
        )
    )
    return blocks


def _interval(value: Mapping[str, float] | None) -> Cell | None:
    if value is None:
        return None
    return Cell(interval(value["value"], value["low"], value["high"]), sort=value["value"])


def _distribution(sets: Sequence[ScoredSet], names: Sequence[str]) -> list[Block]:
    blocks: list[Block] = []
    titles = {"mean_phi": "mean phi of a sample, nats a token", "mean_logprob": "mean log p of a sample, nats a token"}
    for column, title in titles.items():
        bars = dict(zip(names, _bars([one.scalars[column] for one in sets]), strict=True))
        blocks.append(Figure(figures.histogram(bars, title), f"Samples by {title.split(',')[0]}"))
    profiles = {name: _profile(one) for name, one in zip(names, sets, strict=True)}
    blocks.append(Figure(figures.by_position(profiles), "phi against position; the band is two standard errors"))
    groups = {name: _some(one) for name, one in zip(names, sets, strict=True)}
    blocks.append(Figure(figures.paths(groups), f"Cumulative phi of the first {SHOWN_PATHS} samples of each"))
    return blocks


def _bars(sets: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """In the same bins for all; the outermost thousandths count in the outermost bins."""
    low, high = np.quantile(np.concatenate(sets), [0.001, 0.999])
    edges = np.linspace(low, high if high > low else low + 1e-6, BINS + 1)
    middle, width = ((edges[1:] + edges[:-1]) / 2).tolist(), float(edges[1] - edges[0])
    counts = [np.histogram(values.clip(edges[0], edges[-1]), edges)[0].tolist() for values in sets]
    return [{"middle": middle, "count": count, "width": width} for count in counts]


def _profile(one: ScoredSet) -> list[dict[str, float]]:
    profile = Profile()
    for phi in one.lists["phi"]:
        profile.add(phi)
    return profile.rows()


def _some(one: ScoredSet) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    pairs = zip(one.lists["phi"], one.lists["varentropy"], strict=True)
    return {f"{one.name} {i}": pair for i, pair in zip(range(SHOWN_PATHS), pairs, strict=False)}
