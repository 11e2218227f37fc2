"""The rollouts of a step: drawn and annotated, and drawn again where a signal left out some and wants others for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from statewise.signals.advantages import members_of
from statewise.training.received import annotated, sampled
from statewise.types import Rollout, World

if TYPE_CHECKING:
    from statewise.recipe import Recipe


def drawn(recipe: Recipe, first: int, world: World) -> tuple[list[Rollout], int, dict[str, float]]:
    """What a step trains on, the number of draws that it took, and what was reported of them.

    Draws number `first`, `first` + 1 ... of the source, until the signals have left as many groups as a draw holds, at most
    `recipe.draws` of them. Draws are judged whole, so groups beyond the batch were sampled in vain: they are counted.
    """
    draws: list[list[list[Rollout]]] = []  # groups that are left, of each draw
    reports: list[dict[str, float]] = []
    wanted = 1
    while len(draws) < recipe.draws and _num_left(draws) < wanted:
        reports.append({})
        seen = replace(world, report=reports[-1].update)
        size = recipe.batch.rollouts
        rollouts = sampled(recipe.source, recipe.source.sample(first + len(draws), size, seen), size)
        wanted = len({r.group for r in rollouts})
        for signal in recipe.signal:
            rollouts = annotated(signal, signal.annotate(rollouts, seen), world.reads)
        if recipe.draws == 1:
            return rollouts, 1, reports[0]
        draws.append(_groups(rollouts))
    left = [group for draw in draws for group in draw]
    used = [replace(r, group=index) for index, group in enumerate(left[:wanted]) for r in group]
    counts = {
        "num_draws": len(draws),
        "num_groups": len(draws) * wanted,
        "num_groups_dropped": len(draws) * wanted - len(left),
        "num_groups_spare": max(len(left) - wanted, 0),
        "num_groups_missing": max(wanted - len(left), 0),
    }
    return used, len(draws), {**_joined(reports), **counts}


def _num_left(draws: Sequence[Sequence[Any]]) -> int:
    return sum(len(draw) for draw in draws)


def _groups(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    return [[rollouts[i] for i in members] for members in members_of([r.group for r in rollouts])]


def _joined(reports: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of all draws: numbers are summed, maxima are the largest, and what else there is are means, as draws are of one size."""
    return {name: _together(name, [report[name] for report in reports]) for name in reports[0]}


def _together(name: str, values: Sequence[float]) -> float:
    if name.startswith("num_"):
        return sum(values)
    return max(values) if name.endswith("_max") else fmean(values)
