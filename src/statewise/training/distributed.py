"""Accelerate: one process or many; sums over ranks, full state dicts, the learner wrapped once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from statewise.errors import CheckpointError, RunError


def open_accelerator() -> Any:
    """The Accelerator as `accelerate launch`, torchrun or a single process set it up; precision is the model's own."""
    from accelerate import Accelerator

    return Accelerator(mixed_precision="no", cpu=not torch.cuda.is_available())


def total(values: list[float], accelerator: Any) -> list[float]:
    """Sums over ranks, float64."""
    if accelerator.num_processes == 1 or not values:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=accelerator.device)
    return accelerator.reduce(tensor, "sum").tolist()


def gather(value: Any, accelerator: Any) -> list[Any]:
    """A plain value of every rank, in rank order (metrics and names only)."""
    if accelerator.num_processes == 1:
        return [value]
    from accelerate.utils import gather_object

    return gather_object([value])


@contextmanager
def agreed(accelerator: Any) -> Iterator[None]:
    """A RunError or OSError of one rank's block, such as of rank 0, which keeps the run's files, is raised on all.

    Collective: every rank must come here, and there may be no collective inside.
    """
    problem: Exception | None = None
    try:
        yield
    except (RunError, OSError) as error:
        problem = error
    found = next((other for other in gather(problem, accelerator) if other is not None), None)
    if found is not None:
        raise problem or found


def joined(items: list[Any], accelerator: Any) -> list[Any]:
    """The lists of all ranks, one after the other in rank order."""
    return [item for part in gather(items, accelerator) for item in part]


def model_state(learner: Any, *, trained_only: bool = False) -> dict[str, torch.Tensor]:
    """Full state dict of the model inside the learner, on the CPU, whatever wraps it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=trained_only)
    state: dict[str, Any] = get_model_state_dict(learner, options=options)
    prefix = "model."
    return {name.removeprefix("module.").removeprefix(prefix): value for name, value in state.items()}


def optimizer_state(learner: Any, optimizer: Any) -> dict[str, Any]:
    """Full optimizer state keyed by parameter name, on the CPU."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    inner = getattr(optimizer, "optimizer", optimizer)
    state: dict[str, Any] = get_optimizer_state_dict(
        learner, inner, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    # Restoring turns tuples (betas) into lists; as lists from the start, a resumed run saves the same bytes.
    listed = [{k: list(v) if isinstance(v, tuple) else v for k, v in g.items()} for g in state.get("param_groups", [])]
    return {**state, "param_groups": listed}  # empty on ranks other than 0


def named_groups(learner: Any, optimizer: Any) -> list[dict[str, Any]]:
    """The optimizer's groups as it was built, with parameter names in the place of parameters."""
    names = {id(p): name.removeprefix("module.") for name, p in learner.named_parameters()}
    groups = getattr(optimizer, "optimizer", optimizer).param_groups
    return [{**group, "params": [names[id(p)] for p in group["params"]]} for group in groups]


def load_optimizer_state(learner: Any, optimizer: Any, state: dict[str, Any]) -> None:
    """Put a full optimizer state back; a state of other parameters is a CheckpointError."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    inner = getattr(optimizer, "optimizer", optimizer)
    try:
        set_optimizer_state_dict(learner, inner, state, options=StateDictOptions(full_state_dict=True))
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"the optimizer state does not fit the recipe's trained parameters: {error}") from error


def is_sharded(learner: Any) -> bool:
    """Whether parameters are FSDP shards, so that the model can't be called outside the learner."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(p, DTensor) for p in learner.parameters())
