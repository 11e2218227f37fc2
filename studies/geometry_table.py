"""The table and the figure of docs/geometry.md: updates of a study's arms beside their nulls, as trained and at one norm.

python studies/geometry_table.py FOLDER FIGURE.png      FOLDER/end_SEED and FOLDER/norm_SEED of `statewise geometry`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from statewise.geometry.figures import NOISE_MARK
from statewise.geometry.grid import LOG_TICKS, grid, number
from statewise.palette import COLOURS
from statewise.report.picture import write_png
from statewise.stats.hypothesis import mean_interval

# (heading, number, its null or "", which mean)
NUMBERS = (
    ("‖D‖ / ‖W0‖", "relative_norm", "", "mean"),
    ("sparsity", "sparsity", "sparsity_noise", "weighted"),
    ("NSS", "nss", "", "mean"),
    ("drift ratio", "drift_ratio", "drift_ratio_noise", "mean"),
    ("largest angle °", "angle_u_max", "angle_u_noise_max", "mean"),
    ("mean angle °", "angle_u_mean", "angle_u_noise_mean", "mean"),
    ("principal overlap", "principal_overlap", "principal_gaussian_null", "mean"),
    ("low overlap", "low_overlap", "low_gaussian_null", "mean"),
    ("stable rank", "stable_rank", "", "mean"),
    ("D in the leading directions", "projection_both", "projection_both_null", "mean"),
)
DRAWN = (("sparsity", "linear"), ("angle_u_max", "log"), ("low_overlap", "linear"))
SETTINGS = (("end", "as trained"), ("norm", "at one norm"))

Values = dict[str, dict[str, list[float]]]


def read(folder: Path, setting: str) -> Values:
    """{arm: {number: a mean a seed}}."""
    found: Values = {}
    for file in sorted(folder.glob(f"{setting}_*/results.json")):
        for end, groups in json.loads(file.read_text())["aggregates"].items():
            arm = found.setdefault(Path(end).name.split("-seed")[0], {})
            for _, name, null, kind in NUMBERS:
                have = groups["all"][name]["n"]
                for column in filter(None, (name, null)):
                    one = groups["all"][column]  # a null that some matrices lack would be of other matrices
                    arm.setdefault(column, []).append(one[kind] if one["n"] == have else float("nan"))
    return found


def table(values: Values) -> str:
    lines = ["| | " + " | ".join(heading for heading, *_ in NUMBERS) + " |", "|" + " --- |" * (len(NUMBERS) + 1)]
    for arm, numbers in values.items():
        cells = [_cell(numbers[name], numbers.get(null)) for _, name, null, _ in NUMBERS]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(values: list[float], null: list[float] | None) -> str:
    """mean ± half of the 95 % interval over seeds, and the mean of the null."""
    mean, (low, high) = float(np.mean(values)), mean_interval(np.asarray(values))
    beside = "" if null is None else f" ({np.mean(null):.3g})" if np.isfinite(null).all() else " (–)"
    return f"{mean:.3g} ± {(high - low) / 2:.1g}{beside}"


def figure(read_values: dict[str, Values]) -> dict[str, Any]:
    """A row of panels a setting with the same axes; a point a seed, diamonds the means of the nulls."""
    headings = {name: (heading, null) for heading, name, null, _ in NUMBERS}
    titles = [f"{headings[name][0]}, {words}" for _, words in SETTINGS for name, _ in DRAWN]
    plot = grid(titles, len(DRAWN), "", "", "linear")
    for panel, (setting, name) in enumerate((setting, name) for setting, _ in SETTINGS for name, _ in DRAWN):
        axes = {"xaxis": f"x{number(panel)}", "yaxis": f"y{number(panel)}"}
        values, first = read_values[setting], panel % len(DRAWN) == 0
        scale, end = _axis(read_values, name)
        plot["layout"][f"xaxis{number(panel)}"] |= {"type": scale, "range": end} | (LOG_TICKS if scale == "log" else {})
        plot["layout"][f"yaxis{number(panel)}"] |= {
            "type": "category",
            "autorange": "reversed",
            "showticklabels": first,
        }
        null = [float(np.mean(numbers[headings[name][1]])) for numbers in values.values()]
        known = [value if np.isfinite(value) else None for value in null]
        mark = {**NOISE_MARK["marker"], "size": 17, "color": "#ffffff"}
        legend = {"showlegend": panel == 0, "name": "what noise would give"}
        plot["data"].append({**NOISE_MARK, **axes, **legend, "x": known, "y": list(values), "marker": mark})
        for place, (arm, numbers) in enumerate(values.items()):
            points = {"type": "scatter", "mode": "markers", "x": numbers[name], "y": [arm] * len(numbers[name])}
            marker = {"color": COLOURS[place % len(COLOURS)], "size": 7, "opacity": 0.8}
            plot["data"].append({**points, **axes, "marker": marker, "showlegend": False})
    plot["layout"] |= {"height": 160 + 80 * len(read_values["end"]), "legend": {"orientation": "h", "y": 1.05}}
    return plot


def _axis(read_values: dict[str, Values], name: str) -> tuple[str, list[float]]:
    """Scale and range of a number over both settings."""
    largest = max(max(numbers[name]) for values in read_values.values() for numbers in values.values())
    return (
        ("log", [0, float(np.log10(1.5 * largest))]) if dict(DRAWN)[name] == "log" else ("linear", [0, 1.15 * largest])
    )


def main() -> None:
    folder, picture = map(Path, sys.argv[1:3])
    values = {setting: read(folder, setting) for setting, _ in SETTINGS}
    for setting, words in SETTINGS:
        print(f"{words}\n\n{table(values[setting])}\n")
    write_png(picture, figure(values))


if __name__ == "__main__":
    main()
