"""Where a subspace comes from: the two sets of weights whose difference is D."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from statewise.errors import RecipeError
from statewise.geometry.checkpoints import Checkpoint
from statewise.run import RunDir
from statewise.settings import Subspace


def places(settings: Subspace, own_model: str) -> tuple[str, str]:
    """What to open for W_t and W_0. own_model: `model.path` of the recipe, W_0 where nothing else says what it is."""
    run, end = _end(settings)
    if settings.base is not None or run is None:
        return end, settings.base or own_model
    model = run.recipe().model
    adapter = None if model.adapter is None else model.adapter.path
    return end, adapter or model.path


def _end(settings: Subspace) -> tuple[RunDir | None, str]:
    path = Path(settings.origin)
    if (path / "run.json").is_file():
        run = RunDir.open(path)
        steps = run.checkpoints()
        wanted = max(steps, default=0) if settings.at is None else settings.at
        if wanted not in steps:
            raise RecipeError(
                f"optim.subspace: received from = '{settings.origin}' and at = {settings.at}; the run has checkpoints of the "
                f"steps {list(steps)}. checkpoint.every and checkpoint.keep_every say which are kept."
            )
        return run, str(steps[wanted])
    if settings.at is not None:
        raise RecipeError(f"optim.subspace: received at = {settings.at}, and '{settings.origin}' is no run directory.")
    inside = len(path.parents) > 1 and (path.parents[1] / "run.json").is_file()
    return (RunDir.open(path.parents[1]) if inside else None), settings.origin


def matrix(checkpoint: Checkpoint, name: str, shape: torch.Size) -> Tensor:
    """A weight in float64, an adapter's change added. Raises RecipeError where there is none of this name and shape."""
    if name not in checkpoint.tensors:
        raise RecipeError(f"optim.subspace: {checkpoint.label} has no weight '{name}', which the model trains.")
    found = checkpoint.read(name).rows().double()
    if found.shape != shape:
        raise RecipeError(
            f"optim.subspace: '{name}' has shape {tuple(found.shape)} in {checkpoint.label}, expected {tuple(shape)}."
        )
    return found
