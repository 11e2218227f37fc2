"""`statewise merge`: a LoRA as an ordinary model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer

from statewise.cli.evaluate import checkpoint_of
from statewise.cli.output import print_json, say


def command(
    run: str = typer.Argument(
        ..., metavar="RUN", help="A run (its last checkpoint), or a directory with a PEFT adapter."
    ),
    out: Path = typer.Option(..., help="A directory that is not there yet."),
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = typer.Option(
        "auto", help="auto: that of the base's files."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Put a LoRA into its base model's weights, for transformers, vLLM and others that take whole models.

    The sum is taken in float32 (4 bytes a parameter of memory) and rounded once.
    """
    checkpoint = checkpoint_of(run)
    say(f"merging {checkpoint}")
    from statewise.models.merge import merge
    from statewise.training.progress import hide_library_noise

    hide_library_noise()
    stored = merge(checkpoint, out, dtype)
    if as_json:
        return print_json({"model": str(out), "dtype": stored, "checkpoint": str(checkpoint)})
    print(f"{out}: {stored}, from {checkpoint}")
