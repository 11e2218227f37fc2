"""`statewise sample`: what a recipe's source samples, as a data set."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import typer

from statewise.cli.output import print_json, say
from statewise.errors import RecipeError

OPTIONS = ("--out", "--count", "--json", "--quiet", "--help")
REPORT_SECONDS = 5.0


def command(
    words: list[str] = typer.Argument(..., metavar="RECIPE [KEY=VALUE]...", help="A file or a shipped recipe."),
    out: Path = typer.Option(..., help="A .jsonl file that is not there yet."),
    count: int = typer.Option(None, min=1, help="Samples to draw, the most rows written; default: a pass."),
    quiet: bool = typer.Option(False, "--quiet", help="Show no progress."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Write what the source of a recipe gives (sources that sample: rejection, policy, teacher ...) as a data set.

    Nothing is trained. model.path=RUN takes the last checkpoint of a run. The file can be read by the source `dataset`.
    """
    from statewise.cli.words import split_words
    from statewise.recipe import Recipe

    name, overrides = split_words(words, OPTIONS)
    if name is None:
        raise RecipeError("sample: no recipe is named; give a file or a name of `statewise recipe list`.")
    recipe = Recipe.load(name, overrides)
    if out.exists():
        raise RecipeError(f"--out {out}: exists; choose another file.")

    last = time.monotonic() - REPORT_SECONDS

    def report(done: int, wanted: int, measures: dict[str, float]) -> None:
        nonlocal last
        if not quiet and (done >= wanted or time.monotonic() - last >= REPORT_SECONDS):
            last = time.monotonic()
            say(" ".join([f"samples={done}/{wanted}", *(f"{k}={v:.4g}" for k, v in measures.items())]))

    from statewise.training.progress import hide_library_noise
    from statewise.training.sampling import sampled_rows

    hide_library_noise()
    written = _write(out, sampled_rows(recipe, count, report))
    if as_json:
        return print_json({"file": str(out), "rows": written})
    print(f"{written} rows in {out}")


def _write(out: Path, rows: Iterable[dict[str, object]]) -> int:
    """Row by row, under the name with `.partial` behind until all are there; what was sampled stays there on a failure."""
    from statewise.files import naming, to_json

    written = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    with naming(partial), partial.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(to_json(row) + "\n")
            file.flush()
            written += 1
    partial.replace(out)
    return written
