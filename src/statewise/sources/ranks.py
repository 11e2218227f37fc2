"""Work on a list that every rank has, divided over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from statewise.errors import StatewiseError

if TYPE_CHECKING:
    from statewise.types import World

PROBLEM = -1  # a place that no item has


def divided(items: Sequence[Any], work: Callable[[list[Any], list[int]], list[Any]], world: World) -> list[Any]:
    """`work(own items, their places)` on every rank; the results of all, in the order of the items.

    Collective: every rank must call it with the same items. An error of one rank's work is raised on all of them.
    """
    places = list(range(world.rank, len(items), world.num_ranks))
    done: list[Any] = []
    problem: StatewiseError | None = None
    try:
        done = work([items[i] for i in places], places) if places else []
    except StatewiseError as error:
        if world.num_ranks == 1:
            raise
        problem = error
    found: dict[Any, Any] = {}
    for place, value in world.gather([(PROBLEM, problem)] if problem else list(zip(places, done, strict=True))):
        if place == PROBLEM:
            raise problem or value
        found[place] = value
    return [found[i] for i in range(len(items))]
