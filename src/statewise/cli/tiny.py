"""`statewise tiny`: the embedded base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from statewise.cli.output import print_json, say

app = typer.Typer(help="The embedded base model.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `build` a sub-command while it is the only one."""


@app.command("build")
def build_model(
    out: Path = typer.Option(..., help="Directory for the model, tokenizer and build.json."),
    seed: int = typer.Option(0, help="Of the initial weights and the data."),
    as_json: bool = typer.Option(False, "--json", help="Print what build.json holds."),
) -> None:
    """Train the embedded base model from nothing.

    It takes under 15 minutes on 2 cores; the same seed gives the same bytes.
    """
    say(f"building the embedded base with seed {seed} -> {out}")
    from statewise.tiny.build import build

    report = build(out, seed, progress=lambda point: say(_line(point)))
    if as_json:
        return print_json(report)
    print("\n".join(f"{name}: {value}" for name, value in report["scores"].items()))


def _line(point: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in point.items())
