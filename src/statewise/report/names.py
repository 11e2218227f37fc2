"""The shortest names that tell arms apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path


def shortest_names(arms: Sequence[tuple[str | None, Path]]) -> list[str]:
    """A name for each (recipe, directory): the recipe where it is the only one of that name, else the directory.

    As many of a directory's last parts are taken as tell it from all other names; recipe: None where there is none.
    """
    count = Counter(recipe for recipe, _ in arms)
    paths = {place: path.resolve() for place, (recipe, path) in enumerate(arms) if recipe is None or count[recipe] > 1}
    taken = {recipe for place, (recipe, _) in enumerate(arms) if place not in paths}
    for depth in range(1, max((len(path.parts) for path in paths.values()), default=0) + 1):
        names = {place: "/".join(path.parts[-depth:]) for place, path in paths.items()}
        if len(set(names.values())) == len(names) and not taken & set(names.values()):
            break
    return [names[place] if place in paths else str(recipe) for place, (recipe, _) in enumerate(arms)]
