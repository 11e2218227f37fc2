"""The page of a comparison of weights: `statewise geometry`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from statewise.estimates import interval
from statewise.geometry import figures
from statewise.geometry.aggregate import Row, aggregate
from statewise.report.page import Block, Details, Figure, Paragraph, Section, Table, Value, write_page
from statewise.report.picture import find_browser, write_png

Facts = dict[str, Any]
Groups = dict[str, dict[str, dict[str, float]]]
SUMMARY = (
    ("bf16 sparsity", "sparsity"),
    ("of noise of the same norm", "sparsity_noise"),
    ("|D| <= tolerance", "sparsity_tolerance"),
    ("‖D‖", "delta_norm"),
    ("‖D‖ / ‖W0‖", "relative_norm"),
    ("1 - cosine", "one_minus_cosine"),
    ("stable rank", "stable_rank"),
    ("Hill", "hill"),
    ("top-16 energy", "top_16_energy"),
    ("effective rank", "effective_rank"),
    ("NSS", "nss"),
    ("its floor", "nss_floor"),
    ("drift / ‖D‖", "drift_ratio"),
    ("U max °", "angle_u_max"),
    ("V max °", "angle_v_max"),
    ("U median °", "angle_u_median"),
)
NULLS = (
    ("gate, Gaussian", "gaussian"),
    ("gate, one size", "sign"),
    ("gate, own entries", "permuted"),
    ("dealt in the matrix", "within_matrix"),
    ("dealt in rows", "within_rows"),
    ("dealt in columns", "within_columns"),
)
MASKS = (
    ("principal", "principal"),
    ("low-magnitude", "low"),
    ("principal, not low", "principal_not_low"),
    ("low or not principal", "low_or_not_principal"),
)
READING = {
    "angles": "Each point is a matrix: the largest angle between its k leading singular directions before and after. The "
    "largest one is ruled by near-equal singular values at index k; the tables have median, p90 and a k at a wide gap too. "
    "Dashed: i.i.d. noise of the same norm.",
    "spectra": "W0 and W+ lie on each other where training kept the spectrum; D is what was added.",
    "overlaps": "A null is what the overlap would be without any geometry. The dotted line, the masks' density, is the null "
    "only for an update that no rounding has filtered. Bars: 95 % over matrices.",
    "heat": "Each cell is a matrix.",
}


def write(facts: Facts, rows: Sequence[Row], out: Path, png: bool = False) -> Path:
    """OUT/geometry.html, and OUT/figures/*.png where asked for. `facts`: `Comparison.facts()`."""
    if png:
        find_browser()  # before anything is drawn
    drawn = dict(_figures(facts, rows))
    title = f"What training did to the weights: {facts['before']} → {', '.join(facts['after'])}"
    found = aggregate(rows)
    page = write_page(out / "geometry.html", title, lead(facts, found), list(_sections(facts, rows, found, drawn)))
    if png:
        (out / "figures").mkdir(exist_ok=True)
        for (label, name), (heading, figure) in drawn.items():
            place = f"{facts['after'].index(label) + 1}_" if len(facts["after"]) > 1 and label else ""
            write_png(out / "figures" / f"{place}{name}.png", figure, f"{heading}: {label}" if label else heading)
    return page


def lead(facts: Facts, found: dict[str, Groups]) -> str:
    """What a reader must know who reads nothing else: a paragraph a checkpoint."""
    return "\n\n".join(_answer(label, groups["all"]) for label, groups in found.items())


def _answer(label: str, metrics: dict[str, dict[str, float]]) -> str:
    parts = [f"{label}:"]
    if _has(metrics, "sparsity"):
        share = f"{metrics['sparsity']['weighted']:.1%} of the weights are the same in bf16"
        noise = metrics.get("sparsity_noise", {}).get("weighted", math.nan)
        parts.append(
            share + (f" ({noise:.1%} would be after noise of the same norm)." if math.isfinite(noise) else ".")
        )
    if _has(metrics, "relative_norm"):
        parts.append(
            f"On average over the matrices, the update's norm is {metrics['relative_norm']['mean']:.2e} of the weights' and "
            f"its stable rank {metrics['stable_rank']['mean']:.1f}."
        )
    if _has(metrics, "nss"):
        parts.append(f"The spectrum shifted by {metrics['nss']['mean']:.1e}.")
    for words, mask in MASKS[:2]:
        if _has(metrics, f"{mask}_gaussian_excess"):
            excess = metrics[f"{mask}_gaussian_excess"]
            parts.append(
                f"Of the changed entries {metrics[f'{mask}_overlap']['mean']:.3f} lie in the {words} mask; of those that noise "
                f"would change, {metrics[f'{mask}_gaussian_null']['mean']:.3f} would: an excess of {_interval(excess)}."
            )
    return " ".join(parts)


def _has(metrics: dict[str, dict[str, float]], name: str) -> bool:
    return name in metrics and math.isfinite(metrics[name]["mean"])


def _interval(value: dict[str, float]) -> str:
    return interval(value["mean"], value["low"], value["high"], "+.4f")


def _figures(facts: Facts, rows: Sequence[Row]) -> Iterator[tuple[tuple[str, str], tuple[str, figures.Plot]]]:
    """{(checkpoint, name): (heading, figure)}; the checkpoint is "" for a figure of all of them."""
    tiers = facts["settings"]["tiers"]
    if "support" in tiers or "masks" in tiers:
        yield ("", "sparsity"), ("Entries that are the same in bf16", figures.sparsity(rows, facts["after"]))
    for label in facts["after"]:
        own = [row for row in rows if row["checkpoint"] == label]
        for name, heading, tier, draw in figures.PER_CHECKPOINT:
            if tier in tiers:
                yield (label, name), (heading, draw(own))


def _sections(facts: Facts, rows: Sequence[Row], found: dict[str, Groups], drawn: Any) -> Iterator[Section]:
    summary: list[Block] = [_summary(label, groups) for label, groups in found.items()]
    yield Section("Means", [*summary, Paragraph(_choices(facts), "note")])
    if ("", "sparsity") in drawn:
        yield Section("Sparsity", [Figure(drawn["", "sparsity"][1], "Weighted by parameters.")])
    for label, groups in found.items():
        blocks: list[Block] = []
        for (owner, name), (heading, figure) in drawn.items():
            if owner == label:
                blocks += [Paragraph(heading), Figure(figure, READING[name])]
                blocks += [_nulls(groups["all"])] if name == "overlaps" else []
        if blocks:
            yield Section(f"Figures: {label}", blocks)
    if len(facts["after"]) > 1:
        yield Section("Updates against each other", list(_against(facts["after"], rows)))
    yield Section("Matrices", [Details("All matrices", [_matrices(rows)])])


def _summary(label: str, groups: Groups) -> Table:
    shown = [(words, name) for words, name in SUMMARY if _has(groups["all"], name)]
    lines: list[list[Value]] = [
        ["all, weighted by parameters", *(groups["all"][name]["weighted"] for _, name in shown)]
    ]
    for group in groups:
        if group == "all" or group.startswith("module"):
            lines.append([group, *(groups[group].get(name, {}).get("mean") for _, name in shown)])
    return Table(["matrices", *(words for words, _ in shown)], lines, f"{label}: means over matrices.")


def _choices(facts: Facts) -> str:
    """Every free choice behind the numbers."""
    settings, selection = facts["settings"], facts["selection"]
    layers = "all layers" if selection["layers"] is None else f"layers {', '.join(map(str, selection['layers']))}"
    text = (
        f"Choices: {facts['num_matrices']} matrices with {facts['num_entries']:,} weights "
        f"(modules {', '.join(selection['modules'])}; {layers}); K = {settings['top']} leading directions of D; Hill over "
        f"{settings['hill_k']} singular values of D; angles of the {settings['angle_k']} leading directions of W0, at most "
        f"half the short side; principal mask of rank {settings['rank']}, at most a quarter of the short side, and both "
        f"masks of density {settings['alpha']:g}; tolerance {settings['tolerance']:g}; values {settings['values']}"
        f"{', every D at one norm' if settings['same_norm'] else ''}; D and "
        "its singular values in float32, those of the weights in float64."
    )
    return "\n\n".join([text, *facts["notes"]])


def _nulls(metrics: dict[str, dict[str, float]]) -> Table:
    """Excess of the observed overlap over every null, with its interval over matrices."""
    shown = [(words, name) for words, name in NULLS if _has(metrics, f"low_{name}_null")]
    lines: list[list[Value]] = []
    for words, mask in MASKS:
        if _has(metrics, f"{mask}_overlap"):
            nulls = (f"{mask}_{name}" for _, name in shown)
            excess = (f"{metrics[f'{n}_null']['mean']:.3f}: {_interval(metrics[f'{n}_excess'])}" for n in nulls)
            lines.append([words, metrics[f"{mask}_density"]["mean"], metrics[f"{mask}_overlap"]["mean"], *excess])
    caption = "Null: excess of the observed overlap over it, with its 95 % interval over matrices."
    return Table(["mask", "density", "overlap", *(words for words, _ in shown)], lines, caption)


def _against(labels: Sequence[str], rows: Sequence[Row]) -> Iterator[Table]:
    """Means over matrices of what `compare` put beside each row, a table a number."""
    for words, name in (
        ("Jaccard index of the changed entries", "jaccard"),
        ("Jaccard index that two gates give independent noise", "jaccard_gate"),
        ("Jaccard index of independent masks of these densities", "jaccard_independent"),
        ("Sim_K of the right singular subspaces of the updates", "similarity"),
    ):
        lines: list[list[Value]] = []
        for label in labels:
            lists = [row[name] for row in rows if row["checkpoint"] == label and row.get(name)]
            if lists:
                lines.append([label, *(_mean([values[i] for values in lists]) for i in range(len(labels)))])
        if lines:
            yield Table(["", *labels], lines, f"{words}; mean over matrices.")


def _mean(values: Sequence[float]) -> float | None:
    finite = [v for v in values if v is not None and math.isfinite(v)]
    return sum(finite) / len(finite) if finite else None


def _matrices(rows: Sequence[Row]) -> Table:
    shown = [(words, name) for words, name in SUMMARY if any(row.get(name) is not None for row in rows)]
    lines: list[list[Value]] = [
        [row["checkpoint"], row["matrix"], *(row.get(name) for _, name in shown)] for row in rows
    ]
    return Table(["checkpoint", "matrix", *(words for words, _ in shown)], lines)
