"""Combinations that have no meaning, refused when the recipe is parsed: what was received, expected, how to mend it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statewise.component import BASE_COLUMNS, kinds
from statewise.errors import RecipeError

if TYPE_CHECKING:
    from statewise.recipe import Recipe


def refuse(recipe: Recipe) -> None:
    """Raise RecipeError where the recipe is void; the generic rule first, then the hand-written ones."""
    _unwritten(recipe)
    for rule in (_keep_best, _no_updates, _stale_behavior):
        rule(recipe)


def _unwritten(recipe: Recipe) -> None:
    """Something reads a column that no source or signal writes."""
    provided = recipe.provided()
    readers = [("source", recipe.source), *((f"signal[{i}]", s) for i, s in enumerate(recipe.signal))]
    readers += [(f"objective[{i}]", part) for i, term in enumerate(recipe.objective) for part in term.parts]
    for where, reader in readers:
        missing = sorted(reader.columns_read() - provided - BASE_COLUMNS)
        if missing:
            raise RecipeError(
                f"{where}: '{reader.kind}' reads '{missing[0]}', which nothing in this recipe writes (source "
                f"'{recipe.source.kind}' and signals {[s.kind for s in recipe.signal]} write "
                f"{sorted(provided - BASE_COLUMNS)}). {_writer(missing[0])}"
            )


def _writer(column: str) -> str:
    writers = [f"{role} '{k}'" for role in ("source", "signal") for k, c in kinds(role).items() if column in c.writes]
    if column == "gold":
        return "Gold tokens exist on states of a source that has them" + (
            f": {', '.join(writers)}." if writers else "."
        )
    return f"Add {' or '.join(writers)}." if writers else "No registered source or signal writes it."


def _keep_best(recipe: Recipe) -> None:
    best = recipe.checkpoint.keep_best
    names = [getattr(t, "name", None) or t.kind for t in recipe.eval.tasks]
    if best is not None and best not in names:
        raise RecipeError(
            f"checkpoint.keep_best: received '{best}', expected the name of a task of eval.tasks: {names}."
        )


def _no_updates(recipe: Recipe) -> None:
    if all(term.coef == 0 for term in recipe.objective):
        raise RecipeError("objective: every coef is 0, so nothing would be trained.")


def _stale_behavior(recipe: Recipe) -> None:
    """A clip with one update a step has ratio 1 everywhere: legal, but a mistake where it is the point of the loss."""
    single = recipe.batch.minibatches * recipe.batch.epochs == 1
    constant = [t for t in recipe.objective if t.loss.kind == "clip" and getattr(t.loss, "advantage", None) is not None]
    if single and constant:
        raise RecipeError(
            "objective: PSFT's 'clip' compares the policy with that of the start of the step, and with one update a step "
            "they are the same, so it is plain NLL; set batch.minibatches or batch.epochs above 1."
        )
