"""Plotly figures as plain dicts; the page gives them colours. Arms keep their colour and sign in every figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from statewise.palette import COLOURS, SIGNS
from statewise.report.page import label
from statewise.report.scores import BASE

Row = dict[str, Any]
Plot = dict[str, Any]
DASHES = ("solid", "dash", "dot", "dashdot")


class Look:
    """Colour, sign and dash of each arm."""

    def __init__(self, arms: Sequence[str]):
        self.place = {arm: index for index, arm in enumerate(dict.fromkeys(arm for arm in arms if arm != BASE))}

    def colour(self, arm: str) -> str:
        return COLOURS[self.place.get(arm, 7) % len(COLOURS)]

    def sign(self, arm: str) -> str:
        place = self.place.get(arm, 0)
        return SIGNS[(place + place // len(COLOURS)) % len(SIGNS)]

    def dash(self, arm: str) -> str:
        return DASHES[self.place.get(arm, 0) // len(COLOURS) % len(DASHES)]


def pareto(arms: Sequence[Row], target: str, retention: Sequence[str], look: Look) -> Plot:
    """Target score over mean retention: a large sign an arm, a small one a seed, a line at the untrained model."""
    data: list[Plot] = []
    lines = []
    for row in arms:
        if row["arm"] == BASE:
            lines = _cross(1.0, row["scores"][target]["value"]) if target in row["scores"] else []
            continue
        points = [(_kept(seed, retention), seed["scores"].get(target)) for seed in row["by_seed"]]
        points = [(x, y) for x, y in points if x is not None and y is not None]
        if points:
            data += _cloud(row["arm"], points, look)
    layout = {
        "xaxis": {"title": {"text": "retention: mean of post / base"}},
        "yaxis": {"title": {"text": label(target)}},
        "shapes": lines,
        "height": 440,
    }
    return {"data": data, "layout": layout}


def _kept(seed: Row, retention: Sequence[str]) -> float | None:
    ratios = [seed["kept"][task] for task in retention if task in seed["kept"]]
    return sum(ratios) / len(ratios) if ratios else None


def _cloud(arm: str, points: Sequence[tuple[Any, Any]], look: Look) -> list[Plot]:
    """Seeds as small signs, their mean as a large one; one entry in the legend."""
    marker = {"color": look.colour(arm), "symbol": look.sign(arm)}
    name = label(arm)
    shared = {"type": "scatter", "mode": "markers", "name": name, "legendgroup": name}
    xs, ys = [x for x, _ in points], [y for _, y in points]
    hover = f"{name}: retention %{{x:.3f}}, target %{{y:.3f}}<extra></extra>"
    mean = {
        "x": [sum(xs) / len(xs)],
        "y": [sum(ys) / len(ys)],
        "marker": {**marker, "size": 15},
        "hovertemplate": hover,
    }
    seeds = {"x": xs, "y": ys, "marker": {**marker, "size": 7, "opacity": 0.55}, "hovertemplate": hover}
    return [{**shared, **mean}, *([{**shared, **seeds, "showlegend": False}] if len(points) > 1 else [])]


def _cross(x: float, y: float) -> list[Plot]:
    """Lines at the untrained model's place."""
    line = {"color": "#7F7F7F", "width": 1, "dash": "dot"}
    return [
        {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line},
        {"type": "line", "y0": y, "y1": y, "xref": "paper", "x0": 0, "x1": 1, "line": line},
    ]


def changes(contrasts: Sequence[Row], tasks: Sequence[str], look: Look) -> Plot:
    """The change of every task with its interval, an arm in each colour; left of 0 is forgetting."""
    data = []
    arms = list(dict.fromkeys(row["arm"] for row in contrasts))
    for arm in arms:
        rows = [row for task in tasks for row in contrasts if row["arm"] == arm and row["task"] == task]
        values = [row["difference"] for row in rows]
        spread = {
            "type": "data",
            "symmetric": False,
            "array": [v["high"] - v["value"] for v in values],
            "arrayminus": [v["value"] - v["low"] for v in values],
            "thickness": 1.5,
            "width": 3,
        }
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": label(arm),
                "x": [v["value"] for v in values],
                "y": [label(row["task"]) for row in rows],
                "error_x": spread,
                "marker": {"color": look.colour(arm), "symbol": look.sign(arm), "size": 9},
                "orientation": "h",
                "offsetgroup": label(arm),
            }
        )
    layout = {
        "xaxis": {"title": {"text": "change against the untrained model"}, "zeroline": True, "zerolinewidth": 2},
        "yaxis": {"autorange": "reversed", "type": "category"},
        "scattermode": "group",
        "height": max(260, 90 + len(tasks) * (26 + 20 * len(arms))),
    }
    return {"data": data, "layout": layout}


def curve(rows: Sequence[Row], unit: str, look: Look) -> Plot:
    """A metric over trained tokens, a line a run; `unit` at its axis."""
    seen: set[str] = set()
    data = []
    for row in rows:
        name = label(row["arm"])
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "legendgroup": name,
                "showlegend": name not in seen,
                "x": row["x"],
                "y": row["y"],
                "line": {"color": look.colour(row["arm"]), "dash": look.dash(row["arm"]), "width": 1.5},
                "opacity": 0.75,
                "hovertemplate": f"{name}, seed {row['seed']}: %{{y:.4g}} at %{{x:,}}<extra></extra>",
            }
        )
        seen.add(name)
    layout = {"xaxis": {"title": {"text": "trained tokens"}}, "yaxis": {"title": {"text": label(unit)}}, "height": 300}
    return {"data": data, "layout": layout}


def scatter(points: Sequence[Row], x: str, y: str, look: Look) -> Plot:
    """Points {"arm", "x", "y"} with a sign an arm."""
    data = []
    for arm in dict.fromkeys(point["arm"] for point in points):
        own = [point for point in points if point["arm"] == arm]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": label(arm),
                "x": [point["x"] for point in own],
                "y": [point["y"] for point in own],
                "marker": {"color": look.colour(arm), "symbol": look.sign(arm), "size": 9},
            }
        )
    return {"data": data, "layout": {"xaxis": {"title": {"text": label(x)}}, "yaxis": {"title": {"text": label(y)}}}}
