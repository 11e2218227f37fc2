"""Training inside a subspace: gradients, or changes of the weights, projected onto leading singular directions.

In "gradient" mode the optimizer gets G V V^T, as in arXiv 2606.07082. It does not confine the change D = W - W_start: a
coordinate-wise rescaling (Adam) and weight decay lead out of the subspace. In "update" mode W = W_start + D V V^T after
every update, so that nothing does. The share of ||D||_F^2 outside is logged either way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from statewise.errors import RecipeError
from statewise.geometry import krylov
from statewise.geometry.checkpoints import Weights, open_checkpoint
from statewise.geometry.spectrum import decompose
from statewise.training.hooks import Hook
from statewise.training.origin import matrix, places
from statewise.types import derive_seed

if TYPE_CHECKING:
    from statewise.recipe import Recipe
    from statewise.settings import Subspace


@dataclass(frozen=True)
class Basis:
    """Orthonormal columns: left [m, K], right [n, K]; None where that side is not projected."""

    left: Tensor | None
    right: Tensor | None

    def project(self, matrix: Tensor) -> Tensor:
        """U U^T X V V^T of X [m, n], with the sides there are."""
        if self.left is not None:
            matrix = self.left @ (self.left.T @ matrix)
        if self.right is not None:
            matrix = (matrix @ self.right) @ self.right.T
        return matrix

    def to(self, parameter: Tensor) -> Basis:
        """In float32 on the parameter's device."""
        sides = (None if s is None else s.to(parameter.device, torch.float32) for s in (self.left, self.right))
        return Basis(*sides)


def leading(matrix: Tensor, rank: int, side: str) -> Basis:
    """The `rank` leading singular directions of a matrix [m, n], all of them where it has fewer."""
    found = krylov.leading(matrix.float(), rank)
    if found.certified:
        return _sided(torch.from_numpy(found.u), torch.from_numpy(found.v), side)
    whole = decompose(Weights(matrix), rank)
    return _sided(torch.from_numpy(whole.u.copy()), torch.from_numpy(whole.v.copy()), side)


def _sided(left: Tensor, right: Tensor, side: str) -> Basis:
    return Basis(
        left.contiguous() if side in ("left", "both") else None,
        right.contiguous() if side in ("right", "both") else None,
    )


class Confined(Hook):
    """Projects, and measures what leaks out. `start`: the weights that D is counted from."""

    def __init__(self, mode: str, kept: dict[str, nn.Parameter], bases: dict[str, Basis], start: dict[str, Tensor]):
        self.mode, self.kept = mode, kept
        self.bases = {name: basis.to(kept[name]) for name, basis in bases.items()}
        self.start = {name: start[name] for name in kept}
        self.inside = 1.0
        narrow = sorted({str(p.dtype) for p in kept.values()} - {"torch.float32", "torch.float64"})
        if mode == "update" and narrow:
            raise RecipeError(
                f"optim.subspace: mode = 'update' with weights in {narrow[0]}: rounding would throw them out of the subspace "
                "again. Set model.dtype = 'float32'."
            )

    @torch.no_grad()
    def before_update(self) -> None:
        whole = inside = 0.0
        for name, parameter in self.kept.items():
            if parameter.grad is not None:
                gradient = parameter.grad.float()
                projected = self.bases[name].project(gradient)
                whole += float(gradient.double().square().sum())
                inside += float(projected.double().square().sum())
                if self.mode == "gradient":
                    parameter.grad.copy_(projected)
        self.inside = inside / whole if whole else 1.0

    @torch.no_grad()
    def after_update(self) -> None:
        if self.mode == "update":
            for name, parameter in self.kept.items():
                start = self.start[name]
                parameter.copy_(start + self.bases[name].project(parameter - start))

    def after_step(self, step: int) -> dict[str, float]:
        """`subspace/leaked`: share of ||D||_F^2 outside; `subspace/gradient_inside`: share of the gradient's energy inside."""
        return {"subspace/leaked": self.leaked(), "subspace/gradient_inside": self.inside}

    @torch.no_grad()
    def leaked(self) -> float:
        """Over all matrices; 0 where nothing has moved. The part outside is formed itself: a difference of energies is not
        good to more than 1e-7."""
        whole = outside = 0.0
        for name, parameter in self.kept.items():
            change = parameter.float() - self.start[name].float()
            whole += float(change.double().square().sum())
            outside += float((change - self.bases[name].project(change)).double().square().sum())
        return outside / whole if whole else 0.0


def open_bases(
    recipe: Recipe, kept: dict[str, nn.Parameter], accelerator: Any, state: dict[str, Any]
) -> dict[str, Basis]:
    """The subspace of every matrix, the same on every rank; from `state` where a resumed run has it."""
    settings = recipe.optim.subspace
    assert settings is not None
    key = "subspace"
    if key not in state:
        found = _random(recipe.seed, settings, kept) if settings.origin == "random" else _of_run(recipe, kept)
        state[key] = {
            name: {side: _same(s, accelerator) for side, s in vars(basis).items() if s is not None}
            for name, basis in found.items()
        }
    return {name: Basis(sides.get("left"), sides.get("right")) for name, sides in state[key].items()}


def _same(basis: Tensor, accelerator: Any) -> Tensor:
    """Rank 0's, in float32: two machines may find other signs."""
    basis = basis.to(accelerator.device, torch.float32)
    if accelerator.num_processes == 1:
        return basis
    from accelerate.utils import broadcast

    return broadcast(basis)


def _random(seed: int, settings: Subspace, kept: dict[str, nn.Parameter]) -> dict[str, Basis]:
    """Directions of a Gaussian matrix of the same shape."""
    found = {}
    for name, parameter in kept.items():
        generator = torch.Generator().manual_seed(derive_seed(seed, "subspace", name))
        sides = (torch.randn(size, settings.rank, generator=generator, dtype=torch.float64) for size in parameter.shape)
        left, right = (torch.linalg.qr(side).Q for side in sides)
        found[name] = _sided(left, right, settings.side)
    return found


def _of_run(recipe: Recipe, kept: dict[str, nn.Parameter]) -> dict[str, Basis]:
    settings = recipe.optim.subspace
    assert settings is not None
    end, base = (open_checkpoint(place) for place in places(settings, recipe.model.path))
    found = {}
    for name, parameter in kept.items():
        change = matrix(end, name, parameter.shape) - matrix(base, name, parameter.shape)
        if not change.any():
            raise RecipeError(
                f"optim.subspace: '{name}' is the same in {end.label} and {base.label}, so its change has no direction. "
                "Name matrices that moved in optim.subspace.modules, or another `from`."
            )
        found[name] = leading(change, settings.rank, settings.side)
    return found
