"""Where a subspace comes from: the two sets of weights whose difference is D, and their matrices."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from statewise.errors import RecipeError
from statewise.models.load import resolve
from statewise.run import RunDir
from statewise.settings import Subspace


def places(settings: Subspace, own_model: str) -> tuple[Path, Path]:
    """Directories of W_t and W_0. own_model: `model.path` of the recipe, W_0 where nothing else says what it is."""
    run, end = _end(settings)
    start = own_model if run is None else run.recipe().model.path
    return end, Path(resolve(settings.base or start))


def _end(settings: Subspace) -> tuple[RunDir | None, Path]:
    path = Path(resolve(settings.origin))
    if (path / "run.json").is_file():
        run = RunDir.open(path)
        steps = run.checkpoints()
        wanted = max(steps, default=0) if settings.at is None else settings.at
        if wanted not in steps:
            raise RecipeError(
                f"optim.subspace: received from = '{settings.origin}' and at = {settings.at}; the run has checkpoints of the "
                f"steps {list(steps)}. checkpoint.every and checkpoint.keep_every say which are kept."
            )
        return run, steps[wanted]
    if settings.at is not None:
        raise RecipeError(f"optim.subspace: received at = {settings.at}, and '{settings.origin}' is no run directory.")
    inside = len(path.parents) > 1 and (path.parents[1] / "run.json").is_file()
    return (RunDir.open(path.parents[1]) if inside else None), path


class Weights:
    """Matrices of a model directory by parameter name, read one at a time."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.files = _files(directory)

    def matrix(self, name: str, shape: torch.Size) -> Tensor:
        """float64 [m, n]. Raises RecipeError where there is none of this name and shape."""
        from safetensors import safe_open

        if name not in self.files:
            raise RecipeError(f"optim.subspace: {self.directory} has no weight '{name}', which the model trains.")
        with safe_open(self.files[name], framework="pt") as file:
            found = file.get_tensor(name).double()
        if found.shape != shape:
            raise RecipeError(
                f"optim.subspace: '{name}' has shape {tuple(found.shape)} in {self.directory}, expected {tuple(shape)}."
            )
        return found


def _files(directory: Path) -> dict[str, Path]:
    from safetensors import safe_open

    index = directory / "model.safetensors.index.json"
    if index.is_file():
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: directory / file for name, file in listed.items()}
    single = directory / "model.safetensors"
    if not single.is_file():
        raise RecipeError(
            f"optim.subspace: {directory} has no model.safetensors; expected a run, or a model's directory."
        )
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)
