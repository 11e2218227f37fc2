"""Plotly figures as PNG, drawn by a Chromium that is on the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from statewise.errors import MissingProgram
from statewise.files import atomic_write
from statewise.report.page import json_for_script, plotly_source

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
WIDTH, HEIGHT, SCALE = 1000, 440, 2
SECONDS = 60
LAYOUT: dict[str, Any] = {
    "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#222"},
    "paper_bgcolor": "white",
    "plot_bgcolor": "white",
    "margin": {"l": 70, "r": 20, "t": 50, "b": 50},
}
AXIS = {"gridcolor": "#e3e3e3", "linecolor": "#888", "zerolinecolor": "#bbb", "automargin": True}
AXIS_TITLE = {"font": {"size": 13}}
PAGE = """<!doctype html><meta charset="utf-8"><body style="margin:0"><div id="figure"></div>
<script>{plotly}</script><script>
const figure = {figure};
Plotly.newPlot("figure", figure.data, figure.layout, {{staticPlot: true}});
</script></body>"""


def find_browser() -> str:
    """The browser that $STATEWISE_BROWSER names, or the first known one on the PATH. Raises MissingProgram."""
    named = os.environ.get("STATEWISE_BROWSER")
    found = next((path for path in map(shutil.which, [named] if named else BROWSERS) if path), None)
    if found is None:
        raise MissingProgram(
            f"PNG figures need Chromium or Chrome; looked for {named or ', '.join(BROWSERS)}. Install one, name it in "
            "$STATEWISE_BROWSER, or leave --png away: the page shows the same figures."
        )
    return found


def write_png(path: Path, figure: dict[str, Any], title: str = "") -> Path:
    """Draw {"data", "layout"} on white, 1000 pixels wide at double resolution. Raises MissingProgram."""
    browser = find_browser()
    layout = {**LAYOUT, **figure["layout"], "width": WIDTH}
    layout["height"] = layout.get("height", HEIGHT)
    if title:
        layout["title"] = {"text": title, "x": 0.01, "font": {"size": 16}}
        layout["margin"] = {**LAYOUT["margin"], **figure["layout"].get("margin", {}), "t": 80}
    for name, axis in figure["layout"].items():
        if name[1:5] == "axis":
            layout[name] = {**AXIS, **axis, "title": {**AXIS_TITLE, **axis.get("title", {})}}
    with tempfile.TemporaryDirectory(prefix="statewise-png-") as name:
        page, drawn = Path(name) / "page.html", Path(name) / "figure.png"
        content = json_for_script({"data": figure["data"], "layout": layout})
        page.write_text(PAGE.format(plotly=plotly_source(), figure=content), encoding="utf-8")
        _shoot(browser, page, drawn, int(layout["height"]))
        atomic_write(path, drawn.read_bytes())
    return path


def _shoot(browser: str, page: Path, drawn: Path, height: int) -> None:
    command = [
        browser,
        "--headless",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={page.parent / 'profile'}",
    ]
    command += [
        f"--force-device-scale-factor={SCALE}",
        f"--window-size={WIDTH},{height}",
        "--virtual-time-budget=20000",
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--no-sandbox")  # Chromium refuses a sandbox to root
    done = subprocess.run(
        [*command, f"--screenshot={drawn}", page.as_uri()], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if not drawn.is_file():
        raise MissingProgram(f"{browser} drew nothing (exit code {done.returncode}): {done.stderr.strip()[-300:]}")
