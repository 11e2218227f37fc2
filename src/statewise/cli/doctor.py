"""`statewise doctor`: what may be wrong with a recipe, before it costs anything."""

from __future__ import annotations

import sys
from dataclasses import asdict

import typer

from statewise.cli.output import print_json
from statewise.errors import CheckFailed, RecipeError

OPTIONS = ("--json", "--help")
COLOURS = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "failed": typer.colors.RED}
SHOWN = 1200  # characters of a sample


def command(
    words: list[str] = typer.Argument(..., metavar="RECIPE [KEY=VALUE]...", help="A file or a shipped recipe."),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
) -> None:
    """Look at a recipe's data, masks, stop tokens, verifier, teachers and memory.

    Trains nothing; loads weights only to compare a teacher. The exit code is 1 where a check fails.
    """
    from statewise.cli.words import split_words
    from statewise.recipe import Recipe

    name, overrides = split_words(words, OPTIONS)
    if name is None:
        raise RecipeError("doctor: no recipe is named; give a file or a name of `statewise recipe list`.")
    recipe = Recipe.load(name, overrides)
    from statewise.doctor import examine
    from statewise.training.progress import hide_library_noise

    hide_library_noise()
    findings = []
    for finding in examine(recipe):
        findings.append(finding)
        if not as_json:
            _print(finding.check, finding.status, finding.detail, finding.shown)
    failed = [f.check for f in findings if f.status == "failed"]
    if as_json:
        plain = [{k: v for k, v in asdict(f).items() if k != "shown"} for f in findings]
        print_json({"name": recipe.name, "hash": recipe.hash, "healthy": not failed, "findings": plain})
    if failed:
        raise CheckFailed(f"{recipe.name}: {len(failed)} of {len(findings)} checks failed: {', '.join(failed)}.")


def _print(check: str, status: str, detail: str, shown: str) -> None:
    mark = typer.style(status.ljust(7), fg=COLOURS[status]) if sys.stdout.isatty() else status.ljust(7)
    print(f"{mark} {check}: {detail}")
    if shown:
        print(_indented(shown[:SHOWN] + (" ..." if len(shown) > SHOWN else "")))


def _indented(text: str) -> str:
    """Text behind a margin; on a terminal, trained spans are coloured as well as marked."""
    if sys.stdout.isatty():
        text = text.replace("⟦", "\x1b[32m⟦").replace("⟧", "⟧\x1b[0m")
    return "\n".join(f"        {line}" for line in text.splitlines())
