"""The panels of a trajectory as plotly figures in plain dicts: what each number does over the progress of every run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from statewise.palette import COLOURS, SIGNS

Plot = dict[str, Any]
Row = dict[str, Any]
COLUMNS = 3
WIDTH, HEIGHT, TOP = 0.25, 0.36, 0.06  # of a panel, in shares of the figure


# Beside a number's own line: what it must be compared with, in words, its column and its dash.
REFERENCES = {
    "sim_end": (("shuffled", "sim_end_shuffled", "dash"), ("unrelated parts", "sim_end_unrelated", "dot")),
    "sim_part": (("random subspaces", "sim_random", "dot"),),
}


@dataclass(frozen=True)
class Panel:
    """A number over the run: what stands above it, its column, its scale, and whether it is a share in [0, 1]."""

    title: str
    name: str
    scale: str = "linear"
    share: bool = False


def trajectory_panels(runs: dict[str, list[Row]], k: int, hill_k: int) -> Plot:
    """Of rows of `trajectory.means`, over the progress in %; several runs share the axes."""
    shown = (
        Panel("‖D‖<sub>F</sub>, mean over matrices", "delta_norm", "log"),
        Panel("stable rank of D", "stable_rank"),
        Panel(f"Hill estimate, {hill_k} values", "hill"),
        Panel(f"energy in the top {k} directions", f"top_{k}_energy", share=True),
        Panel(f"Sim<sub>{k}</sub>(D<sub>t</sub>, D<sub>end</sub>)", "sim_end", share=True),
        Panel(f"Sim<sub>{k}</sub> of a part and the one before", "sim_part", share=True),
    )
    percent = {name: [{**row, "percent": 100 * row["progress"]} for row in rows] for name, rows in runs.items()}
    return panels(percent, shown, "percent", "progress, %")


def panels(runs: dict[str, list[Row]], shown: Sequence[Panel], x: str, x_title: str) -> Plot:
    """A grid of three panels a row; `runs`: {name: rows}, each run with its colour and sign."""
    figure: Plot = {
        "data": [],
        "layout": {"height": 640, "legend": {"orientation": "h", "y": -0.12}, "annotations": []},
    }
    for index, panel in enumerate(shown):
        last_row = index + COLUMNS >= len(shown)
        _axes(figure["layout"], index, panel, x_title if last_row else None)
        for place, (run, rows) in enumerate(runs.items()):
            figure["data"] += _lines(run, rows, panel.name, place, index, x)
    figure["layout"]["showlegend"] = len(runs) > 1
    return figure


def _lines(run: str, rows: Sequence[Row], name: str, place: int, index: int, x: str) -> list[Plot]:
    colour = COLOURS[place % len(COLOURS)]
    own = {"line": {"color": colour, "width": 2}, "marker": {"symbol": SIGNS[place % len(SIGNS)], "size": 7}}
    lines = [
        _line(run, rows, name, index, x) | own | {"mode": "lines+markers", "legendgroup": run, "showlegend": index == 0}
    ]
    for words, column, dash in REFERENCES.get(name, ()):
        if rows[0].get(column) is not None:
            dashed = {"line": {"color": colour, "width": 1.5, "dash": dash}, "mode": "lines", "showlegend": False}
            lines.append(_line(f"{run}: {words}", rows, column, index, x) | dashed)
    return lines


def _line(run: str, rows: Sequence[Row], name: str, index: int, x: str) -> Plot:
    number = "" if index == 0 else str(index + 1)
    known = [row for row in rows if row.get(name) is not None]
    return {
        "type": "scatter",
        "name": escape(run, quote=False),
        "x": [row[x] for row in known],
        "y": [row[name] for row in known],
        "customdata": [row["step"] for row in known],
        "hovertemplate": "step %{customdata}: %{y:.4g}<extra>" + escape(run, quote=False) + "</extra>",
        "xaxis": f"x{number}",
        "yaxis": f"y{number}",
    }


def _axes(layout: Plot, index: int, panel: Panel, x_title: str | None) -> None:
    column, row = index % COLUMNS, index // COLUMNS
    left, top = column * (1 - WIDTH) / (COLUMNS - 1), 1 - TOP - row * (HEIGHT + 2.4 * TOP)
    number = "" if index == 0 else str(index + 1)
    layout[f"xaxis{number}"] = {
        "domain": [left, left + WIDTH],
        "anchor": f"y{number}",
        "rangemode": "tozero",
        "title": {"text": x_title, "standoff": 4} if x_title else None,
    }
    layout[f"yaxis{number}"] = {
        "domain": [top - HEIGHT, top],
        "anchor": f"x{number}",
        "type": panel.scale,
        **({"range": [0, 1.03]} if panel.share else {} if panel.scale == "log" else {"rangemode": "tozero"}),
    }
    place = {"x": left, "y": top + 0.01, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
    layout["annotations"].append({"text": panel.title, "showarrow": False, "font": {"size": 13}, **place})
