"""The panels of a trajectory as plotly figures in plain dicts: what each number does over the progress of every run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from statewise.geometry.grid import LOG_TICKS, Plot, curve, grid, number

Row = dict[str, Any]
COLUMNS = 3
ARM = re.compile(r"-seed\d+(-[0-9a-f]+)?$")  # what a study adds to an arm's name
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
    """A grid of three panels a row; `runs`: {name: rows}. Seeds of one arm share a colour, a sign and an entry of the legend."""
    groups = {run: ARM.sub("", run) for run in runs}
    places = {group: place for place, group in enumerate(dict.fromkeys(groups.values()))}
    first = {group: run for run, group in reversed(groups.items())}
    several = {group for group in places if list(groups.values()).count(group) > 1}
    figure = grid([panel.title for panel in shown], COLUMNS, x_title, "", "linear")
    figure["layout"] |= {"height": 640, "showlegend": len(runs) > 1}
    for index, panel in enumerate(shown):
        limits = {"range": [0, 1.03]} if panel.share else {"rangemode": "tozero"}
        limits = LOG_TICKS if panel.scale == "log" else limits
        figure["layout"][f"xaxis{number(index)}"] |= {"rangemode": "tozero"}
        figure["layout"][f"yaxis{number(index)}"] |= {"type": panel.scale, **limits}
        for run, rows in runs.items():
            group = groups[run]
            lines = _lines(run, rows, panel.name, places[group], index, x)
            if group in several:
                lines[0] |= {"name": escape(group, quote=False), "showlegend": index == 0 and first[group] == run}
                lines = [_thin(line, group) for line in lines]
            figure["data"] += lines
    return figure


def _thin(line: Plot, group: str) -> Plot:
    """A seed among others: less ink, and hidden with its arm."""
    marker = {**line["marker"], "size": 4}
    return {**line, "legendgroup": group, "line": {**line["line"], "width": 1.2}, "marker": marker, "opacity": 0.75}


def _lines(run: str, rows: Sequence[Row], name: str, place: int, index: int, x: str) -> list[Plot]:
    """The number's own line, and dashed in its colour what it must be compared with."""
    lines = [_line(run, rows, name, place, index, x)]
    for words, column, dash in REFERENCES.get(name, ()):
        if rows[0].get(column) is not None:
            line = _line(f"{run}: {words}", rows, column, place, index, x)
            dashed = {"line": {**line["line"], "width": 1.5, "dash": dash}, "mode": "lines", "legendgroup": run}
            lines.append(line | dashed | {"showlegend": False})
    return lines


def _line(run: str, rows: Sequence[Row], name: str, place: int, index: int, x: str) -> Plot:
    known = [row for row in rows if row.get(name) is not None]
    line = curve(run, [row[x] for row in known], [row[name] for row in known], place, index)
    told = {"hovertemplate": "step %{customdata}: %{y:.4g}<extra>" + line["name"] + "</extra>"}
    return line | told | {"customdata": [row["step"] for row in known]}
