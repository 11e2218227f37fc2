"""Figures of a comparison as plotly's plain dicts; whoever shows them gives the colours of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from statistics import median
from typing import Any

from statewise.geometry.aggregate import Row, summarise
from statewise.geometry.grid import Plot, curve, grid, number
from statewise.palette import COLOURS

ORDER = ("q", "k", "v", "o", "gate", "up", "down", "other", "embed", "lm_head", "rest")
GREY = "#8a8a8a"
NOISE = "Gaussian noise of the same norm"
# White with a dark rim: seen on any bar and in both themes of the page.
NOISE_MARK: Plot = {
    "type": "scatter",
    "mode": "markers",
    "name": NOISE,
    "legendgroup": "noise",
    "marker": {"symbol": "diamond", "size": 10, "color": "#ffffff", "line": {"color": "#222222", "width": 2}},
}
DEGREES = [x * 10.0**e for e in range(-6, 2) for x in (1, 2, 5)]
MANY_LAYERS = 12  # above these lines are drawn thin
# (title, column, scale of the colours); one outlier would take all the colours of a linear scale.
HEATS = (
    ("bf16 sparsity", "sparsity", "linear"),
    ("‖D‖ / ‖W0‖", "relative_norm", "log"),
    ("stable rank of D", "stable_rank", "linear"),
    ("NSS", "nss", "log"),
    ("largest angle, U (degrees)", "angle_u_max", "log"),
    ("low-magnitude overlap less its null", "low_gaussian_excess", "signed"),
)
TICKS = [x * 10.0**e for e in range(-9, 4) for x in (1, 2, 5)]


def modules_of(rows: Sequence[Row]) -> list[str]:
    return [name for name in ORDER if any(row["module"] == name for row in rows)]


def sparsity(rows: Sequence[Row], labels: Sequence[str]) -> Plot:
    """Bars by module type, a colour a checkpoint; a diamond where noise of the same norm would end."""
    data: list[Plot] = []
    levels: list[Plot] = []
    modules = ["all", *modules_of(rows)]
    width = 0.8 / len(labels)
    for place, label in enumerate(labels):
        own = [row for row in rows if row["checkpoint"] == label]
        centres = [index + (place - (len(labels) - 1) / 2) * width for index in range(len(modules))]
        bars, noise = ([_weighted(own, m, name) for m in modules] for name in ("sparsity", "sparsity_noise"))
        bar = {"type": "bar", "name": escape(label, quote=False), "x": centres, "y": bars, "width": width * 0.92}
        texts = {
            "text": [f"{v:.0%}" if v is not None else "" for v in bars],
            "textposition": "inside",
            "insidetextanchor": "start",
            "textangle": 0,
        }
        data.append({**bar, **texts, "marker": {"color": COLOURS[place % len(COLOURS)]}})
        levels.append({**NOISE_MARK, "x": centres, "y": noise, "showlegend": place == 0})
    if any(value is not None for mark in levels for value in mark["y"]):
        data += levels
    layout = {
        "barmode": "overlay",
        "yaxis": {"title": {"text": "share of entries equal in bf16"}, "rangemode": "tozero"},
        "xaxis": {"title": {"text": "module type"}, "tickvals": list(range(len(modules))), "ticktext": modules},
        "legend": {"orientation": "h", "y": 1.12},
    }
    return {"data": data, "layout": layout}


def _weighted(rows: Sequence[Row], module: str, metric: str) -> float | None:
    """Weighted by parameters, which for shares of entries is the share of all of them."""
    have = [r for r in rows if module in ("all", r["module"]) and r.get(metric) is not None]
    value = summarise([r[metric] for r in have], [r["entries"] for r in have])["weighted"]
    return None if math.isnan(value) else value


def angles(rows: Sequence[Row]) -> Plot:
    """The largest angle of every matrix over its layer, U and V apart; dashed: noise of the same norm, mean over types."""
    figure = grid(["U: output side", "V: input side"], 2, "layer", "largest principal angle, degrees", "log")
    for panel, side in enumerate("uv"):
        for place, module in enumerate(modules_of(rows)):
            own = sorted((r for r in rows if r["module"] == module and r.get(f"angle_{side}_max")), key=_layer)
            line = curve(module, [_layer(r) for r in own], [r[f"angle_{side}_max"] for r in own], place, panel)
            if len(own) > MANY_LAYERS:
                line["line"]["width"], line["marker"]["size"] = 1, 5
            figure["data"].append(line)
        figure["layout"][f"yaxis{number(panel)}"] |= {"tickvals": DEGREES, "ticktext": [f"{x:g}" for x in DEGREES]}
        noise = _by_layer(rows, f"angle_{side}_noise_max")
        if noise:
            line = {"line": {"color": GREY, "dash": "dash", "width": 4}, "marker": {}, "mode": "lines"}
            figure["data"].append({**curve(NOISE, list(noise), list(noise.values()), 0, panel), **line})
    return figure


def _layer(row: Row) -> int:
    return -1 if row["layer"] is None else int(row["layer"])


def _by_layer(rows: Sequence[Row], metric: str) -> dict[int, float]:
    found: dict[int, float] = {}
    for layer in sorted({_layer(row) for row in rows}):
        values = [r[metric] for r in rows if _layer(r) == layer and _finite(r.get(metric))]
        if values:
            found[layer] = sum(values) / len(values)
    return found


def spectra(rows: Sequence[Row]) -> Plot:
    """Singular values of W0, W+ and D over their index, for a matrix of the middle layer of each type; both axes log."""
    chosen = [row for module in modules_of(rows) if (row := _middle(rows, module)) is not None]
    titles = [f"{r['module']}, layer {_layer(r)} (NSS {r['nss']:.1e})" for r in chosen]
    figure = grid(titles, min(4, len(titles)), "index i", "σ<sub>i</sub>", "log")
    for panel, row in enumerate(chosen):
        for place, (name, column, width) in enumerate(
            (("W0", "spectrum_before", 5), ("W+", "spectrum_after", 1.5), ("D = W+ - W0", "spectrum_delta", 2))
        ):
            values = [v for v in row[column] if v > 0]
            index = _spread(len(values))
            line = curve(name, [i + 1 for i in index], [values[i] for i in index], (5, 7, 1)[place], panel)
            colour = ("#56B4E9", "#222222", "#D55E00")[place]
            figure["data"].append({**line, "mode": "lines", "line": {"color": colour, "width": width}})
        figure["layout"][f"xaxis{number(panel)}"] |= {"type": "log", "dtick": 1}
        figure["layout"][f"yaxis{number(panel)}"]["dtick"] = 1
    return figure


def _spread(n: int) -> list[int]:
    """At most about 200 indices up to n, dense at the start as a logarithmic axis shows it."""
    return sorted({min(n - 1, round(n ** (i / 200)) - 1) for i in range(201)}) if n else []


def _middle(rows: Sequence[Row], module: str) -> Row | None:
    own = [row for row in rows if row["module"] == module and row.get("spectrum_before")]
    layer = median(_layer(row) for row in own) if own else 0
    return min(own, key=lambda row: abs(_layer(row) - layer)) if own else None


def overlaps(rows: Sequence[Row]) -> Plot:
    """Overlap of the changed entries with both masks by module type, beside the nulls; the line is the masks' density."""
    figure = grid(["principal mask", "low-magnitude mask"], 2, "module type", "share of changed entries", "linear")
    modules = modules_of(rows)
    shown = (
        ("changed entries", "", COLOURS[0], "circle", 12),
        ("Gaussian noise through bf16, same density", "_gaussian_null", COLOURS[1], "diamond-open", 13),
        ("noise of one size through bf16, same density", "_sign_null", COLOURS[3], "triangle-up-open", 11),
        ("dealt out within rows", "_within_rows_null", GREY, "line-ew-open", 14),
    )
    for panel, mask in enumerate(("principal", "low")):
        for name, suffix, colour, sign, size in shown:
            column = f"{mask}{suffix}" if suffix else f"{mask}_overlap"
            marks = [summarise(*_values(rows, module, column)) for module in modules]
            bars = [m["high"] - m["mean"] if math.isfinite(m["high"]) else 0 for m in marks]
            point = {"mode": "markers", "marker": {"color": colour, "symbol": sign, "size": size, "line": {"width": 2}}}
            line = curve(name, modules, [m["mean"] for m in marks], 0, panel)
            spread = (
                {"error_y": {"type": "data", "array": bars, "color": colour, "thickness": 1.5}} if not suffix else {}
            )
            figure["data"].append({**line, **point, **spread})
        densities = [row[f"{mask}_density"] for row in rows if _finite(row.get(f"{mask}_density"))]
        if densities:
            figure["layout"]["shapes"].append(_across(sum(densities) / len(densities), panel))
    figure["layout"]["height"] = 460
    return figure


def _values(rows: Sequence[Row], module: str, metric: str) -> tuple[list[float], list[float]]:
    have = [row for row in rows if row["module"] == module and _finite(row.get(metric))]
    return [row[metric] for row in have], [row["entries"] for row in have]


def _across(height: float, panel: int) -> Plot:
    axis = number(panel)
    line = {"color": GREY, "dash": "dot", "width": 1.5}
    return {
        "type": "line",
        "xref": f"x{axis} domain",
        "yref": f"y{axis}",
        "x0": 0,
        "x1": 1,
        "y0": height,
        "y1": height,
        "line": line,
    }


def heat_maps(rows: Sequence[Row]) -> Plot:
    """Layer by module type, a map a number, each with its own scale."""
    shown = [heat for heat in HEATS if any(_finite(row.get(heat[1])) for row in rows)]
    columns = min(3, len(shown))
    figure = grid([title for title, *_ in shown], columns, "module type", "layer", "linear", gap=0.07)
    modules, layers = modules_of(rows), sorted({_layer(row) for row in rows})
    for panel, (title, name, scale) in enumerate(shown):
        cells = {(_layer(row), row["module"]): row.get(name) for row in rows}
        z = [[_number_or_none(cells.get((layer, module))) for module in modules] for layer in layers]
        domains = [figure["layout"][f"{axis}axis{number(panel)}"]["domain"] for axis in "xy"]
        bar = {"x": domains[0][1] + 0.005, "y": sum(domains[1]) / 2, "len": domains[1][1] - domains[1][0]}
        figure["data"].append(
            {
                "type": "heatmap",
                "x": modules,
                "y": [str(layer) for layer in layers],
                "xaxis": f"x{number(panel)}",
                "yaxis": f"y{number(panel)}",
                "customdata": z,
                "hovertemplate": f"layer %{{y}} %{{x}}<br>{title}: %{{customdata:.4g}}<extra></extra>",
                **_coloured(z, scale, {**bar, "thickness": 10, "exponentformat": "power"}),
            }
        )
        first = panel % columns == 0
        axis = {
            "type": "category",
            "autorange": "reversed",
            "showticklabels": first,
            "ticks": "outside" if first else "",
        }
        figure["layout"][f"yaxis{number(panel)}"] |= axis
    return figure


def _coloured(z: list[list[float | None]], scale: str, bar: Plot) -> Plot:
    """Values and colours of a map; on a logarithmic scale the bar still names the values."""
    if scale == "signed":
        return {"z": z, "colorscale": "RdBu", "zmid": 0, "colorbar": bar}
    if scale == "linear":
        return {"z": z, "colorscale": "Viridis", "colorbar": bar}
    logs = [[math.log10(v) if v is not None and v > 0 else None for v in line] for line in z]
    known = [v for line in logs for v in line if v is not None] or [0.0]
    ticks = [t for t in TICKS if min(known) <= math.log10(t) <= max(known)]
    named = {"tickvals": [math.log10(t) for t in ticks], "ticktext": [f"{t:g}" for t in ticks]} if ticks else {}
    return {"z": logs, "colorscale": "Viridis", "colorbar": {**bar, **named}}


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _number_or_none(value: Any) -> float | None:
    return float(value) if _finite(value) else None


# What stands on a page: file name, title, the tier whose rows it needs, and how to draw one checkpoint's rows.
PER_CHECKPOINT: tuple[tuple[str, str, str, Callable[[Sequence[Row]], Plot]], ...] = (
    ("angles", "Rotation of the leading singular subspaces", "angles", angles),
    ("spectra", "Spectra before and after", "spectrum", spectra),
    ("overlaps", "Where the changed entries lie, and what the nulls expect", "masks", overlaps),
    ("heat", "Layer by module type", "support", heat_maps),
)
