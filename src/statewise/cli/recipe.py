"""`statewise recipe`: what a recipe says, before anything is loaded."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

import typer

from statewise.cli.output import print_json, print_table
from statewise.errors import RecipeError

app = typer.Typer(help="Show, list and check recipes.", no_args_is_help=True)
PASS_ON = {"ignore_unknown_options": True}
WORDS = typer.Argument(..., metavar="RECIPE [KEY=VALUE]...", help="A file or a shipped recipe, and overrides.")
JSON = typer.Option(False, "--json", help="Print as JSON.")


@app.command("show", context_settings=PASS_ON)
def show(words: list[str] = WORDS, as_json: bool = JSON) -> None:
    """The method in words, as comments, and the resolved recipe as TOML: a file to go on from."""
    from statewise.recipe import Recipe

    recipe = Recipe.load(*_named(words))
    if as_json:
        plain = {"name": recipe.name, "hash": recipe.hash, "explain": recipe.explain(), "recipe": recipe.to_plain()}
        return print_json(plain)
    print("\n".join(f"# {line}" for line in [f"{recipe.name} {recipe.hash}", *recipe.explain()]))
    print(f"\n{recipe.to_toml()}", end="")


@app.command("list")
def list_recipes(as_json: bool = JSON) -> None:
    """The recipes that come with statewise."""
    from statewise.recipe import shipped_recipes

    rows = [[name, _about(path)] for name, path in shipped_recipes().items()]
    if as_json:
        return print_json([{"name": name, "about": about} for name, about in rows])
    print_table(["recipe", "about"], rows)


@app.command("check", context_settings=PASS_ON)
def check(words: list[str] = WORDS, as_json: bool = JSON) -> None:
    """Whether a recipe is valid, its verifiers' files and functions included; code 2 and the reason where it is not."""
    from statewise.recipe import Recipe
    from statewise.training.ready import check_verifiers

    recipe = Recipe.load(*_named(words))
    check_verifiers(recipe)
    if as_json:
        return print_json({"name": recipe.name, "hash": recipe.hash, "valid": True})
    print(f"{recipe.name}: valid ({recipe.hash})")


def _named(words: list[str]) -> tuple[str, list[str]]:
    from statewise.cli.words import split_words

    name, overrides = split_words(words, ("--json", "--help"))
    if name is None:
        raise RecipeError("no recipe is named; give a file, or a name of `statewise recipe list`.")
    return name, overrides


def _about(path: Path) -> str:
    """The first sentence of the comment that the file begins with, without the commands in it."""
    lines = takewhile(lambda line: line.startswith("# "), path.read_text(encoding="utf-8").splitlines())
    text = " ".join(line[2:] for line in takewhile(lambda line: not line.startswith("#   "), lines))
    return re.split(r"(?<!Dr)\. |[.:]$", text)[0] + "." if text else ""
