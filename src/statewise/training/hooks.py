"""What a recipe adds around the optimizer: the loop calls hooks at fixed places and knows of no method."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from statewise.errors import RecipeError, nearest
from statewise.geometry.matrices import GROUPS, MODULES
from statewise.training.distributed import is_sharded

if TYPE_CHECKING:
    from statewise.models.load import LoadedPolicy
    from statewise.recipe import Recipe
    from statewise.settings import OptimSettings


class Hook:
    """Called in every update and at the end of every step, on every rank; hooks run in the order of the list."""

    def before_update(self) -> None:
        """The gradients are complete, and not clipped yet."""

    def after_update(self) -> None:
        """The optimizer has changed the weights."""

    def after_step(self, step: int) -> dict[str, float]:
        """Step `step`, counted from 1, is done: metrics for its row."""
        return {}


def open_hooks(
    recipe: Recipe, policy: LoadedPolicy, learner: Any, accelerator: Any, state: dict[str, Any], *, resumed: bool
) -> list[Hook]:
    """The hooks that `recipe.optim` asks for.

    learner: the wrapped policy; state: `World.state`, where a hook keeps what a resumed run needs. Raises RecipeError.
    """
    optim = recipe.optim
    named = [name for name in ("subspace", "rpsft", "extrapolate") if getattr(optim, name) is not None]
    if not named:
        return []
    if is_sharded(learner):
        raise RecipeError(
            f"optim.{named[0]}: works on whole weight matrices, which is not possible while parameters are sharded (FSDP). "
            "Run data-parallel (DDP) or on one process."
        )
    start = start_weights(recipe, policy, resumed)
    hooks: list[Hook] = []
    if optim.rpsft is not None:
        from statewise.training.rpsft import KeepLeading

        hooks.append(KeepLeading(optim.rpsft, matrices(policy.model, optim.rpsft.modules), start))
    if optim.subspace is not None:
        from statewise.training.subspace import Confined, open_bases

        kept = matrices(policy.model, optim.subspace.modules)
        bases = open_bases(recipe, kept, accelerator, state)
        hooks.append(Confined(optim.subspace.mode, kept, bases, start))
    if optim.extrapolate is not None:
        from statewise.training.extrapolation import Extrapolation

        hooks.append(Extrapolation(recipe, policy, accelerator, start, state))
    return hooks


def start_weights(recipe: Recipe, policy: LoadedPolicy, resumed: bool) -> dict[str, Any]:
    """The matrices that the run started from: a copy, or, where it was resumed, read again."""
    model = policy.model
    if resumed:
        from statewise.models.load import load_policy

        model = load_policy(recipe.model).model
    device = next(policy.model.parameters()).device
    return {name: p.detach().to(device, copy=True) for name, p in matrices(model, []).items()}


def matrices(model: Any, modules: list[str]) -> dict[str, nn.Parameter]:
    """The weights of the linear modules, the output head left out, by parameter name; those of `modules` only, if any.

    modules: such as "q_proj", or the names and groups of `statewise geometry`: "q", "attention", "mlp". Raises RecipeError
    for one that there is none of.
    """
    found = dict(_linear(model))
    stems = {name: name.split(".")[-2] for name in found}
    wanted: set[str] = set()
    for module in modules:
        parts = GROUPS.get(module, (module,))
        named = {stem for part in parts for stem in (*MODULES.get(part, ()), part)} & set(stems.values())
        if not named:
            raise RecipeError(f"modules: no linear module '{module}'{nearest(module, {*stems.values(), *GROUPS})}")
        wanted |= named
    return {name: p for name, p in found.items() if not modules or stems[name] in wanted}


def _linear(model: Any) -> Iterator[tuple[str, Any]]:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            yield f"{name}.weight", module.weight


def freeze_others(model: Any, optim: OptimSettings) -> None:
    """Leave trainable what a subspace confines, where the recipe says that nothing else moves."""
    if optim.subspace is None or optim.subspace.others == "free":
        return
    kept = matrices(model, optim.subspace.modules)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in kept)
