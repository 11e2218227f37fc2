"""Work on a list that every rank has, divided over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from statewise.types import World


def divided(items: Sequence[Any], work: Callable[[list[Any], list[int]], list[Any]], world: World) -> list[Any]:
    """`work(own items, their places)` on every rank; the results of all, in the order of the items.

    Collective: every rank must call it with the same items.
    """
    places = list(range(world.rank, len(items), world.num_ranks))
    done = work([items[i] for i in places], places) if places else []
    found = dict(world.gather(list(zip(places, done, strict=True))))
    return [found[i] for i in range(len(items))]
