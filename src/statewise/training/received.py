"""What sources and signals give to a step, looked at before it is used, so that a fault is told of whom it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from statewise.component import CAPABILITIES, Component, Signal, Source
from statewise.errors import DataError
from statewise.training.packing import column_names
from statewise.types import Batch, Rollout

if TYPE_CHECKING:
    from statewise.recipe import Recipe


def sampled(source: Source, value: Any, wanted: int) -> list[Rollout]:
    """What `source.sample` gave: at most `wanted` rollouts. Raises DataError."""
    rollouts = _listed(f"source '{source.kind}': sample", value)
    if len(rollouts) > wanted:
        raise DataError(
            f"source '{source.kind}': sample returned {len(rollouts)} rollouts where {wanted} were asked for; expected "
            "num_rollouts of them."
        )
    return rollouts


def annotated(signal: Signal, value: Any, reads: frozenset[str]) -> list[Rollout]:
    """What `signal.annotate` gave: rollouts with the columns of `reads` that the signal declares. Raises DataError."""
    rollouts = _listed(f"signal '{signal.kind}': annotate", value)
    if rollouts and type(signal).attach is Signal.attach:
        _written(signal, column_names(rollouts), reads)
    return rollouts


def attached(signal: Signal, value: Any, reads: frozenset[str]) -> Batch:
    """What `signal.attach` gave: a batch with what of `reads` the signal declares. Raises DataError."""
    if not isinstance(value, Batch):
        raise DataError(f"signal '{signal.kind}': attach returned {_shown(value)}, expected the Batch.")
    _written(signal, [*value.columns, *value.dense], reads)
    return value


def broken_columns(recipe: Recipe, batch: Batch) -> list[str]:
    """`column 'x' of signal 'y'` for each column that is not finite where something is trained."""
    import torch

    broken = [n for n, v in sorted(batch.columns.items()) if not torch.isfinite(v[batch.action_mask_BT]).all()]
    return [f"column '{name}'{_writer(recipe, name)}" for name in broken]


def _writer(recipe: Recipe, name: str) -> str:
    parts: list[Component] = [*reversed(recipe.signal), recipe.source]
    return next((f" of {p.role} '{p.kind}'" for p in parts if name in p.columns_written()), "")


def _written(signal: Signal, present: Sequence[str], reads: frozenset[str]) -> None:
    for name in sorted((signal.columns_written() & reads) - CAPABILITIES - set(present)):
        raise DataError(
            f"signal '{signal.kind}': declares '{name}' in `writes` and did not write it; expected annotate to return "
            f"rollout.with_columns({name}=[a number for every token]) for every rollout."
        )


def _listed(who: str, value: Any) -> list[Rollout]:
    if not isinstance(value, list | tuple):
        raise DataError(f"{who} returned {_shown(value)}, expected a list of Rollouts.")
    for index, item in enumerate(value):
        if not isinstance(item, Rollout):
            raise DataError(f"{who} returned a list whose item {index} is {_shown(item)}, expected a Rollout.")
    return list(value)


def _shown(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
