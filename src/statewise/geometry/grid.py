"""Panels of a figure in plotly's plain dicts: axes side by side, and lines on them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from statewise.palette import COLOURS, SIGNS

Plot = dict[str, Any]
LOG_TICKS = {"dtick": "D2", "tickformat": ".3~g"}  # 1, 2, 5 of each decade, written in full


def number(panel: int) -> str:
    """What plotly appends to the names of a panel's axes."""
    return "" if panel == 0 else str(panel + 1)


def curve(name: str, x: Sequence[Any], y: Sequence[Any], place: int, panel: int) -> Plot:
    """A line with signs in a panel, in the colour and sign of `place`; its name is in the legend once."""
    colour = COLOURS[place % len(COLOURS)]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": escape(str(name), quote=False),
        "x": list(x),
        "y": list(y),
        "xaxis": f"x{number(panel)}",
        "yaxis": f"y{number(panel)}",
        "legendgroup": name,
        "showlegend": panel == 0,
        "line": {"color": colour, "width": 2},
        "marker": {"symbol": SIGNS[place % len(SIGNS)], "size": 8, "color": colour},
    }


def grid(titles: Sequence[str], columns: int, x: str, y: str, scale: str, gap: float = 0.05) -> Plot:
    """Empty panels, titled (in plotly's markup), `columns` a row; axis titles stand at the left and below only."""
    lines = -(-len(titles) // max(columns, 1))
    layout: Plot = {"annotations": [], "shapes": [], "height": max(420, 330 * lines), "legend": {"orientation": "h"}}
    wide, high = 1 / columns if columns else 1, 1 / lines if lines else 1
    for panel, title in enumerate(titles):
        column, row = panel % columns, panel // columns
        left, top = column * wide, 1 - row * high
        across = [left + 0.03 * (column > 0), left + wide - gap]
        down = [top - high + 0.05 + 0.05 * (lines > 1), top - 0.05]
        axis = number(panel)
        below = panel + columns >= len(titles)
        layout[f"xaxis{axis}"] = {
            "domain": across,
            "anchor": f"y{axis}",
            "title": {"text": x if below else "", "standoff": 4},
        }
        layout[f"yaxis{axis}"] = {
            "domain": down,
            "anchor": f"x{axis}",
            "type": scale,
            "title": {"text": y if column == 0 else "", "standoff": 4},
            **(LOG_TICKS if scale == "log" else {}),
        }
        corner = {"x": across[0], "y": down[1] + 0.01, "xanchor": "left", "yanchor": "bottom"}
        text = {"text": title, "showarrow": False, "font": {"size": 13}}
        layout["annotations"].append({**text, **corner, "xref": "paper", "yref": "paper"})
    layout["legend"] |= {"y": -0.05 if lines > 1 else -0.14}
    return {"data": [], "layout": layout}
