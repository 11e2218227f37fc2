"""From a report's plain data to the sections of its page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from statewise.report import figures
from statewise.report.answer import estimate
from statewise.report.facts import CURVES, GEOMETRY
from statewise.report.model import ReportModel
from statewise.report.page import Block, Cell, Details, Figure, Paragraph, Section, SideBySide, Table, Value, anchor
from statewise.report.scores import BASE

Row = dict[str, Any]
DRIFT_FIGURES = 6
READING = (
    "gain: score after - score before; forgetting F = base - post (nats a token: post - base), so that F > 0 is a loss. "
    "retention: the mean over retention tasks of post / base. All differences are between the same examples."
)


def sections(model: ReportModel) -> list[Section]:
    """All sections that the model has something for."""
    look = figures.Look([row["arm"] for row in model.arms] + [card["arm"] for card in model.cards])
    found = [
        Section("Scores", _scores(model)),
        Section("Target against retention", _pareto(model, look)),
        Section("Forgetting by task", _forgetting(model, look)),
        Section("Learning curves", _curves(model, look, _learning(model)), columns=2),
        Section("Likelihood of the training data", _curves(model, look, ["phi"])),
        Section("Geometry of the weights", _curves(model, look, _geometry(model)), columns=2),
        Section("Drift against retention", _drift(model, look), columns=2),
        *_diagnostics(model),
        Section("Budgets", _budgets(model)),
        Section("Recipe differences", _differences(model)),
        Section("Completions", _completions(model)),
        Section("Run cards", _cards(model)),
    ]
    return [section for section in found if section.blocks]


def lead(model: ReportModel) -> str:
    """The answer, a paragraph a finding."""
    return "\n\n".join(model.answer)


def _scores(model: ReportModel) -> list[Block]:
    blocks: list[Block] = [Paragraph(model.about)] if model.about else []
    blocks += [Paragraph("\n\n".join(model.warnings), "warning")] if model.warnings else []
    if not model.arms:
        return blocks
    tasks = [row["task"] for row in model.tasks if row["purpose"] != "target" and row["task"] != model.target]
    columns = ["arm", "seeds", *([model.target] if model.target else [])]
    columns += ["gain", "p", *([f"against {model.versus}"] if model.versus else []), "retention", "mean F"]
    rows = [_score_row(model, row, tasks) for row in model.arms]
    scores = Table([*columns, *tasks], rows, "Means over seeds with 95 % intervals. Arms lead to their run cards.")
    notes = [Paragraph(text, "note") for text in (model.evaluated, READING, model.method) if text]
    return [*blocks, scores, *notes, *_contrasts(model)]


def _score_row(model: ReportModel, row: Row, tasks: Sequence[str]) -> list[Value]:
    arm, scores = row["arm"], row["scores"]
    gain = _contrast(model, arm, BASE, model.target)
    other = _contrast(model, arm, model.versus, model.target)
    cells: list[Value] = [Cell(arm, href=f"#run-{anchor(arm)}" if arm != BASE else None), len(row["seeds"]) or None]
    cells += [_score(scores.get(model.target))] if model.target else []
    cells += [_estimate(gain and gain["difference"], "+.3f"), _p(gain)]
    cells += [_estimate(other and other["difference"], "+.3f")] if model.versus else []
    cells += [_estimate(row.get("retention")), _estimate(row.get("mean_forgetting"), "+.3f")]
    return [*cells, *(_score(scores.get(task)) for task in tasks)]


def _contrast(model: ReportModel, arm: str, against: str | None, task: str | None) -> Row | None:
    wanted = (arm, against, task)
    return next((row for row in model.contrasts if (row["arm"], row["against"], row["task"]) == wanted), None)


def _score(value: Row | None) -> Value:
    return None if value is None else _estimate(value)


def _estimate(value: Row | None, form: str = ".3f") -> Value:
    if value is None or value["value"] is None:
        return None
    return Cell(estimate(value, form).replace(", ", ",\u00a0"), sort=value["value"])  # an interval stays on its line


def _p(row: Row | None) -> Value:
    """Holm's p-value, or the plain one of a probe; which of both is said."""
    if row is None or row["p"] is None:
        return None
    adjusted = row["p_holm"] is not None
    p = row["p_holm"] if adjusted else row["p"]
    text = f"{p:.3f}" if p >= 0.001 else "< 0.001"
    return Cell(text if adjusted else f"{text} unadjusted", sort=p, hint=f"unadjusted {row['p']:.2g}")


def _contrasts(model: ReportModel) -> list[Block]:
    """Every comparison, the ones that showed nothing too."""
    rows: list[list[Value]] = [
        [
            row["arm"],
            row["against"],
            row["task"],
            row["purpose"],
            _estimate(row["difference"], "+.3f"),
            f"{row['gained']} / {row['lost']}",
            _p(row),
            row["verdict"],
        ]
        for row in model.contrasts
    ]
    columns = ["arm", "against", "task", "purpose", "difference", "items up / down", "p", "verdict"]
    caption = "Positive is better for the arm; for nats a token, a fall is better."
    return [Details(f"All {len(rows)} comparisons", [Table(columns, rows, caption)])] if rows else []


def _pareto(model: ReportModel, look: figures.Look) -> list[Block]:
    retention = [row["task"] for row in model.tasks if row["purpose"] == "retention"]
    if not model.target or not retention or not any("retention" in row for row in model.arms):
        return []
    plot = figures.pareto(model.arms, model.target, retention, look)
    caption = (
        "Up is a gain, right is less forgetting. Large: mean of an arm; small: its seeds; dotted: the untrained model."
    )
    return [Figure(plot, caption)]


def _forgetting(model: ReportModel, look: figures.Look) -> list[Block]:
    rows = [row for row in model.contrasts if row["against"] == BASE]
    units = {row["task"]: row["metric"] for row in model.tasks}
    shares = [row["task"] for row in model.tasks if row["better"] == "higher"]
    nats = [row["task"] for row in model.tasks if row["better"] == "lower"]
    blocks: list[Block] = []
    for tasks, words in ((shares, "Scores"), (nats, "Cross-entropy of text, where a fall counts as positive")):
        chosen = [row for row in rows if row["task"] in tasks]
        if chosen:
            unit = ", ".join(dict.fromkeys(units[task].replace("_", " ") for task in tasks))
            caption = f"{words} ({unit}): change with its 95 % interval. Left of 0: forgotten."
            blocks.append(Figure(figures.changes(chosen, tasks, look), caption))
    return blocks


def _curves(model: ReportModel, look: figures.Look, names: Sequence[str]) -> list[Block]:
    return [
        Figure(figures.curve(model.curves[name], _words(name)[1], look), _words(name)[0])
        for name in names
        if name in model.curves
    ]


def _words(name: str) -> tuple[str, str]:
    """Caption and unit of a curve."""
    if name in CURVES:
        return CURVES[name]
    kind, _, rest = name.partition("/")
    return (f"Score on {rest}", "score") if kind == "eval" else (rest.replace("_", " ").capitalize(), "")


def _learning(model: ReportModel) -> list[str]:
    return [name for name in model.curves if name != "phi" and not name.startswith(GEOMETRY)]


def _geometry(model: ReportModel) -> list[str]:
    return [name for name in model.curves if name.startswith(GEOMETRY)]


def _drift(model: ReportModel, look: figures.Look) -> list[Block]:
    """A figure for each measure of the states, the strongest first, and a table of all."""
    blocks: list[Block] = []
    for row in model.drift_ranks[:DRIFT_FIGURES]:
        name = row["measure"]
        points = [
            {"arm": run["arm"], "x": run["measures"][name], "y": run["kept"]}
            for run in model.drift
            if name in run["measures"]
        ]
        told = f"{name}: Spearman {estimate(row['rho'], '+.2f')} over {row['runs']} runs"
        blocks.append(Figure(figures.scatter(points, name, "retention", look), told))
    arms = list(dict.fromkeys(run["arm"] for run in model.drift))
    rows = [
        [row["measure"], row["runs"], _estimate(row["rho"], "+.2f"), *(row["means"].get(arm) for arm in arms)]
        for row in model.drift_ranks
    ]
    caption = (
        "Rank correlation with retention over runs, and means of arms. Of many measures some look strong by chance."
    )
    return [*blocks, Table(["measure", "runs", "Spearman", *arms], rows, caption)] if rows else []


def _diagnostics(model: ReportModel) -> list[Section]:
    found = []
    for name, rows in model.tables.items():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        cells = [[_plain(row.get(column)) for column in columns] for row in rows]
        found.append(Section(name.replace("_", " ").capitalize(), [Table(columns, cells, f"diagnostics/{name}")]))
    return found


def _plain(value: Any) -> Value:
    if value is None or (isinstance(value, int | float | str) and not isinstance(value, bool)):
        return value
    return json.dumps(value, ensure_ascii=False)


def _budgets(model: ReportModel) -> list[Block]:
    columns = [
        "arm",
        "runs",
        "steps",
        "trained tokens",
        "sampled tokens",
        "teacher tokens",
        "FLOPs",
        "seconds in steps",
        "seconds in all",
    ]
    names = ("seeds", "step", "tokens", "generated_tokens", "teacher_tokens", "flops", "seconds", "wall_seconds")
    rows = [[row["arm"], *(_amount(row[name], name) for name in names)] for row in model.budgets]
    caption = (
        "Means over seeds. Teacher tokens: sampled or scored by another model. FLOPs: estimated, training, sampling and "
        "teachers. In all: with evaluations and saving."
    )
    told: list[Block] = [Paragraph(model.budget)] if model.budget else []
    return [*told, Table(columns, rows, caption)] if rows else []


def _amount(value: float | None, name: str) -> Value:
    if value is None or name == "flops":
        return None if not value else Cell(f"{value:.3g}", sort=value)
    return round(value)


def _differences(model: ReportModel) -> list[Block]:
    if not model.differences:
        return []
    arms = list(model.differences[0]["values"])
    rows = [[row["setting"], *(_setting(row["values"].get(arm)) for arm in arms)] for row in model.differences]
    return [Table(["setting", *arms], rows, "Settings in which arms differ; – is the default.")]


def _setting(value: Any) -> Value:
    return None if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _completions(model: ReportModel) -> list[Block]:
    items = [(_asked(row), row["before"], row["after"]) for row in model.completions]
    caption = (
        "Of each arm's first seed; those whose score changed come first. Search for an arm, a word, 'wrong to right'."
    )
    return [SideBySide(items, ("question", "untrained", "trained"), caption)] if items else []


def _asked(row: Row) -> str:
    head = f"{row['arm']} · {row['task']} · {row['id']} · {_mark(row['scores'])}"
    return f"{head}\n\n{row['prompt']}\n\nreference: {row['reference']}"


def _mark(scores: Sequence[float]) -> str:
    words = [{0.0: "wrong", 1.0: "right"}.get(float(score), f"{score:.2f}") for score in scores]
    return " to ".join(words)


def _cards(model: ReportModel) -> list[Block]:
    blocks: list[Block] = []
    for card in model.cards:
        columns = list(card["runs"][0])
        facts: list[Block] = [
            Paragraph("\n".join(card["method"]), "code"),
            Table(columns, [[_plain(run[column]) for column in columns] for run in card["runs"]], "Runs"),
            *([Paragraph("\n".join(json.dumps(row) for row in card["data"]), "code")] if card["data"] else []),
            Paragraph("; ".join(f"{k} {v}" for k, v in card["versions"].items()), "note"),
            Paragraph("; ".join(f"{k}: {_setting(v)}" for k, v in card["hardware"].items()), "note"),
        ]
        blocks.append(Details(card["arm"], facts, f"run-{anchor(card['arm'])}"))
    return blocks
