"""`statewise train`: a recipe into a run directory."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from statewise import __version__
from statewise.cli.output import is_first, print_json, say
from statewise.errors import Interrupted, RecipeError

if TYPE_CHECKING:
    from statewise.recipe import Recipe
    from statewise.run import RunDir

OPTIONS = ("--out", "--resume", "--dry-run", "--json", "--quiet", "--track", "--help")


def command(
    words: list[str] = typer.Argument(None, metavar="RECIPE [KEY=VALUE]...", help="A file or a shipped recipe."),
    out: Path = typer.Option(None, help="Run directory; default runs/NAME-HASH."),
    resume: Path = typer.Option(None, help="Continue this run from its last valid checkpoint."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show what would be done; write nothing."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="Show no progress."),
    track: list[str] = typer.Option([], help="tensorboard, wandb or trackio, beside metrics.jsonl."),
) -> None:
    """Train a recipe. Any setting can be given as optim.lr=1e-4 or --optim.lr 1e-4.

    When interrupted (Ctrl-C, SIGTERM) it writes a checkpoint and ends with code 3; --resume goes on.
    """
    from statewise.cli.words import split_words

    name, overrides = split_words(words or [], OPTIONS)
    if resume is not None:
        if name is not None or out is not None:
            raise RecipeError("--resume: takes the recipe and the directory from the run; leave RECIPE and --out away.")
        recipe, target = _resumed(resume, overrides, dry_run), resume
    elif name is None:
        raise RecipeError("train: no recipe is named; give a file, a name of `statewise recipe list`, or --resume RUN.")
    else:
        recipe = _load(name, overrides)
        target = out or Path("runs") / f"{recipe.name}-{recipe.hash}"
    if dry_run:
        return _show_plan(recipe, as_json)
    if not quiet:
        say(
            f"statewise {__version__}: {'resuming' if resume else 'training'} {recipe.name} ({recipe.hash}) -> {target}"
        )
    run = _train(recipe, target, resume is not None, quiet, track)
    if is_first():
        _report(run, as_json)


def _load(name: str, overrides: list[str]) -> Recipe:
    from statewise.recipe import Recipe

    return Recipe.load(name, overrides)


def _resumed(path: Path, overrides: list[str], dry_run: bool) -> Recipe:
    """The run's recipe; with another budget where the overrides say so, which the run then keeps."""
    from statewise.run import RunDir

    run = RunDir.open(path)
    recipe = run.recipe(overrides)
    if recipe.hash == run.recipe_hash or dry_run:
        return recipe
    changed = [o for o in overrides if not o.startswith("budget.")]
    if changed:
        raise RecipeError(f"--resume: received the override '{changed[0]}'; only budget.* may change in a resumed run.")
    if overrides and is_first():
        with run.lock():
            run.replace_recipe(recipe)
    return recipe


def _train(recipe: Recipe, target: Path, resume: bool, quiet: bool, track: list[str]) -> RunDir:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the loop takes over: the same as Ctrl-C
    try:
        from statewise.training.loop import train

        return train(recipe, target, resume=resume, quiet=quiet, track=track)
    except KeyboardInterrupt:
        started = (target / "run.json").is_file()
        hint = f"go on with: statewise train --resume {target}" if started else "nothing had been written"
        raise Interrupted(f"interrupted; {hint}") from None


def _show_plan(recipe: Recipe, as_json: bool) -> None:
    from dataclasses import asdict

    from statewise.training.plan import plan
    from statewise.training.progress import hide_library_noise
    from statewise.training.ready import check_files

    hide_library_noise()
    check_files(recipe)
    planned = plan(recipe)
    if as_json:
        return print_json({**_recipe_facts(recipe), "plan": asdict(planned)})
    print("\n".join([*recipe.explain(), *planned.words()]))
    print(f"\n# {recipe.name} {recipe.hash}\n{recipe.to_toml()}")
    if planned.preview:
        print(planned.preview)


def _recipe_facts(recipe: Recipe) -> dict[str, Any]:
    return {"name": recipe.name, "hash": recipe.hash, "explain": recipe.explain(), "recipe": recipe.to_plain()}


def _report(run: RunDir, as_json: bool) -> None:
    from statewise.cli.runs import print_summary, summary

    if as_json:
        return print_json(summary(run))
    print_summary(summary(run))
