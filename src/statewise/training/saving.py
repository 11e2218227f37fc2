"""Writing a session's checkpoint and restoring one: weights in Hugging Face layout, optimizer, and what was spent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statewise.errors import RecipeError
from statewise.training import checkpoint
from statewise.training.budget import Spent
from statewise.training.distributed import load_optimizer_state, model_state, named_groups, optimizer_state

if TYPE_CHECKING:
    from statewise.run import RunDir
    from statewise.training.loop import Session

OPTIMIZER, COMPONENTS = "optimizer.safetensors", "components.safetensors"


def save(session: Session, best: int | None) -> None:
    """Write the checkpoint of the current step (collective: every rank must call it) and prune old ones."""
    training = session.training
    weights = model_state(training.learner, trained_only=session.recipe.model.adapter is not None)
    optimizer = optimizer_state(training.learner, training.optimizer)
    if session.is_main:

        def write(path: Path) -> None:
            checkpoint.save_model(path, session.policy.model, session.policy.tokenizer, weights)
            checkpoint.save_tensors(path / OPTIMIZER, optimizer)
            if training.world.state:
                checkpoint.save_tensors(path / COMPONENTS, training.world.state)

        checkpoint.save(session.run.path, training.spent.step, write=write, state=asdict(training.spent))
        prune(session, best)
    training.accelerator.wait_for_everyone()


def prune(session: Session, best: int | None) -> None:
    """Delete the checkpoints that the recipe does not keep; `best`: the step with the best score so far."""
    settings = session.recipe.checkpoint
    keep = {best} if best is not None else set()
    checkpoint.prune(session.run.path, settings.keep_last, settings.keep_every, keep)


def find(run: RunDir, accelerator: Any, say: Callable[[str], None]) -> Path | None:
    """The newest valid checkpoint, the same on every rank; rank 0 checks it and clears what an interrupted write left."""
    if accelerator.is_main_process:
        checkpoint.clear(run.path, say)
        run.data_are_settled = checkpoint.latest_valid(run.path, say) is not None
    accelerator.wait_for_everyone()
    return checkpoint.latest_valid(run.path, lambda text: None)


def component_state(found: Path | None) -> dict[str, Any]:
    """`World.state` as the checkpoint holds it."""
    file = None if found is None else found / COMPONENTS
    return checkpoint.load_tensors(file) if file is not None and file.is_file() else {}


def keep_optimizer(session: Session) -> None:
    """Start with the optimizer state beside the weights of `model.path`, of the parameters that are trained, by name.

    Learning rate, betas and decay are the recipe's own. Raises RecipeError where there is none of a parameter.
    """
    training, file = session.training, Path(session.recipe.model.path) / OPTIMIZER
    if not file.is_file():
        raise RecipeError(
            f"optim.state = 'keep': model.path = '{session.recipe.model.path}' has no {OPTIMIZER}; expected a checkpoint of a "
            "run, such as runs/sft/checkpoints/step_000050."
        )
    stored = checkpoint.load_tensors(file)["state"]
    groups = named_groups(training.learner, training.optimizer)
    names = [name for group in groups for name in group["params"]]
    missing = sorted(set(names) - stored.keys())
    if missing:
        raise RecipeError(f"optim.state = 'keep': {file} holds no state of '{missing[0]}', which this recipe trains.")
    kept = {"state": {name: stored[name] for name in names}, "param_groups": groups}
    load_optimizer_state(training.learner, training.optimizer, kept)


def restore(session: Session, found: Path | None) -> None:
    """Put optimizer and counters back (the weights were loaded from `found`), and drop what came after that step."""
    training = session.training
    if found is not None:
        state = checkpoint.load_tensors(found / OPTIMIZER)
        load_optimizer_state(training.learner, training.optimizer, state)
        training.spent = Spent(**checkpoint.load_state(found))
    if session.is_main:
        lost = session.run.truncate(training.spent.step if found is not None else -1)
        if lost:
            session.warn(f"{lost} rows of metrics.jsonl could not be read, as after a crash, and were removed.")
    session.display.say(f"resuming at step {training.spent.step}")
    training.accelerator.wait_for_everyone()
