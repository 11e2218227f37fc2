"""Figures of scored data, as plain plotly dictionaries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from statewise.report.page import label

Figure = dict[str, Any]
COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#66ccee", "#ccbb44")
PATH_POINTS = 400  # of a cumulative path that are drawn


def histogram(sets: Mapping[str, Mapping[str, Any]], title: str) -> Figure:
    """Shares of samples (or tokens) by phi, one outline a set. sets: {name: {"middle", "count", "width"}}."""
    data = []
    for (name, bars), colour in zip(sets.items(), COLOURS, strict=False):
        total = max(1, sum(bars["count"]))
        density = [c / total / bars["width"] for c in bars["count"]]
        line = {"color": colour, "shape": "hvh"}
        data.append(_line(name, bars["middle"], density, line) | {"fill": "tozeroy", "opacity": 0.8})
    return _figure(data, title, "density", zero="x")


def by_position(sets: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    """Mean phi against the token's place in its answer, with two standard errors to each side."""
    data = []
    for (name, rows), colour in zip(sets.items(), COLOURS, strict=False):
        x = [row["position"] + 1 for row in rows]
        bounds = [[row["mean"] + sign * 2 * row["se"] for row in rows] for sign in (1, -1)]
        band = {"fill": "toself", "fillcolor": colour, "opacity": 0.2, "showlegend": False, "hoverinfo": "skip"}
        data.append(_line(name, x + x[::-1], bounds[0] + bounds[1][::-1], {"width": 0}) | band)
        data.append(_line(name, x, [row["mean"] for row in rows], {"color": colour}))
    figure = _figure(data, "place of the token in its answer", "mean phi, nats", zero="y")
    figure["layout"]["xaxis"]["type"] = "log"
    return figure


def paths(groups: Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray]]]) -> Figure:
    """Cumulative phi of single samples, and the band that nine in ten own samples stay in at each place.

    groups: {group: {sample: (phi [n], varentropy [n])}}.
    """
    data: list[Figure] = []
    longest = np.zeros(0)
    for (group, samples), colour in zip(groups.items(), COLOURS, strict=False):
        for index, (name, (phi, varentropy)) in enumerate(samples.items()):
            shown = _thinned(len(phi))
            line = _line(group, (shown + 1).tolist(), np.cumsum(phi)[shown].tolist(), {"color": colour, "width": 1.2})
            data.append(
                line | {"legendgroup": group, "showlegend": index == 0, "text": label(name), "hoverinfo": "text+x+y"}
            )
            longest = varentropy if len(varentropy) > len(longest) else longest
    if len(longest):
        shown = _thinned(len(longest))
        half = 1.645 * np.sqrt(np.cumsum(longest.astype(np.float64)))[shown]
        x = (shown + 1).tolist()
        band = {"fill": "toself", "fillcolor": "#888888", "opacity": 0.25, "hoverinfo": "skip"}
        name = "nine in ten own samples (states of the longest)"
        data.insert(0, _line(name, x + x[::-1], [*half.tolist(), *(-half[::-1]).tolist()], {"width": 0}) | band)
    return _figure(data, "place of the token in its answer", "sum of phi, nats", zero="y")


def _thinned(count: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(count, PATH_POINTS)).astype(np.int64))


def _line(name: str, x: Sequence[float], y: Sequence[float], line: Mapping[str, Any]) -> Figure:
    finite = [None if isinstance(v, float) and not math.isfinite(v) else v for v in y]
    return {"type": "scatter", "mode": "lines", "name": label(name), "x": list(x), "y": finite, "line": dict(line)}


def _figure(data: Sequence[Figure], x: str, y: str, zero: str) -> Figure:
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    axes[f"{zero}axis"] |= {"zeroline": True}  # type: ignore[dict-item]
    return {"data": list(data), "layout": {**axes, "hovermode": "closest", "legend": {"orientation": "h", "y": -0.25}}}
