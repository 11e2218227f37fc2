"""What a recipe needs from files, looked for before anything is loaded: data, verifiers, evaluation tasks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from statewise.errors import DataError, RecipeError

if TYPE_CHECKING:
    from statewise.component import Task
    from statewise.recipe import Recipe


def check_files(recipe: Recipe) -> None:
    """Raises RecipeError, DataError or MissingExtra, with the field, where training or an evaluation in it could not begin."""
    check_data(recipe)
    check_verifiers(recipe)
    check_tasks(recipe)


def check_data(recipe: Recipe) -> None:
    """Local data of the source are there; a hub id is left to its loading."""
    from statewise.sources.reading import find_data

    for leaf in recipe.source.leaves:
        data = getattr(leaf, "data", "tiny:")
        if not data.startswith("tiny:"):
            with _named("source"):
                find_data(data, recipe.base_dir)


def check_verifiers(recipe: Recipe, *, evaluation: bool = True) -> None:
    """The files and functions of verifiers are there, of those of `evaluation` too; cheap, as no data are read."""
    parts: list[tuple[str, Any]] = [("source", leaf) for leaf in recipe.source.leaves]
    parts += [(f"signal[{i}]", part) for i, part in enumerate(recipe.signal)]
    for where, part in [*parts, *(tasks_of(recipe) if evaluation else ())]:
        verifier = getattr(part, "verifier", None)
        if verifier is not None:
            with _named(f"{where}.verifier"):
                verifier.opened(recipe.base_dir)


def check_tasks(recipe: Recipe) -> None:
    """The evaluation tasks have names of their own, and the first rows of their local data have what they read."""
    from statewise.evals import parsed

    with _named("eval"):
        parsed(recipe.eval.all_tasks())
    for where, task in tasks_of(recipe):
        with _named(where):
            task.check_files(recipe.base_dir)


def tasks_of(recipe: Recipe) -> list[tuple[str, Task]]:
    """The evaluation tasks under the names of their fields, the probe too."""
    tasks: list[Any] = recipe.eval.all_tasks()
    num_own = len(recipe.eval.tasks)
    return [(f"eval.tasks[{i}]" if i < num_own else "eval.probe", task) for i, task in enumerate(tasks)]


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Errors of bad input begin with the field."""
    try:
        yield
    except (RecipeError, DataError) as error:
        raise type(error)(f"{where}: {str(error).removeprefix('plugins: ')}") from None
