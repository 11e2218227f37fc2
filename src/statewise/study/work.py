"""Doing one run of a study in this process; what is done already is left."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from statewise.errors import RunError
from statewise.recipe import Recipe
from statewise.run import PARTS, RunDir
from statewise.study.plan import Job, Plan, references, resolve

ORPHAN_SECONDS = 120.0  # how long a run's writer, whose study was killed, gets to write its checkpoint and end


def is_done(plan: Plan, key: str) -> bool:
    """Whether there is nothing left to do."""
    path = plan.path(key)
    return (path / "run.json").is_file() and RunDir.open(path).status == "completed"


def execute(plan: Plan, key: str) -> None:
    """Do the piece called `key`, going on where it was left; raises what training raises."""
    if is_done(plan, key):
        return
    from statewise.training.loop import train

    path = plan.path(key)
    recipe = plan.bases[key] if key in plan.bases else concrete(plan, plan.by_key[key])
    _wait_for_writer(path)
    resume = (path / "run.json").is_file()
    if resume:
        run = RunDir.open(path)
        if (
            run.recipe_hash != recipe.hash
        ):  # the same work (its identity is in the path) where a path to a teacher moved
            with run.lock():
                run.replace_recipe(recipe)
    elif path.is_dir() and {p.name for p in path.iterdir()} <= {"recipe.toml", "lock", *PARTS}:
        shutil.rmtree(path)  # a run that was killed while it was being made
    train(recipe, path, resume=resume, quiet=True)


def _wait_for_writer(path: Path) -> None:
    until = time.monotonic() + ORPHAN_SECONDS
    while (path / "lock").is_file() and RunDir(path).is_locked():
        if time.monotonic() > until:
            raise RunError(
                f"{path}: another process has been writing to this run for {ORPHAN_SECONDS:.0f} s; end it first."
            )
        time.sleep(0.2)


def concrete(plan: Plan, job: Job) -> Recipe:
    """The job's recipe with paths in place of `arm:...`: a checkpoint to start from, a run to be taught by.

    Raises RunError where the run has no checkpoint.
    """
    plain = job.recipe.to_plain()
    named = {(arm, seed): plan.by_arm[arm, job.seed if seed is None else seed] for arm, seed in references(plain)}
    model = plain.pop("model", {})
    source = _with_cache(plain.pop("source"), str(plan.out / "cache" / "teachers"))
    resolved = resolve(
        {"source": source, **plain}, {reference: str(plan.path(other.key)) for reference, other in named.items()}
    )
    checkpoints = {reference: _checkpoint(plan.path(named[reference].key)) for reference in references(model)}
    return Recipe.from_plain(
        {**resolved, "model": resolve(model, checkpoints)}, name=job.recipe.name, base_dir=job.recipe.base_dir
    )


def _with_cache(source: Any, folder: str) -> Any:
    """A source whose frozen teachers' completions are kept for the other arms."""
    if isinstance(source, Mapping):
        fixed = source.get("kind") == "teacher" and isinstance(source.get("teacher"), str)  # "ema" is a table
        kept = {"cache": folder} if fixed and "cache" not in source else {}
        return {**{key: _with_cache(value, folder) for key, value in source.items()}, **kept}
    return [_with_cache(item, folder) for item in source] if isinstance(source, list) else source


def _checkpoint(path: Path) -> str:
    checkpoints = RunDir.open(path).checkpoints()
    if not checkpoints:
        raise RunError(f"{path}: has no checkpoint to start from.")
    return str(checkpoints[max(checkpoints)])
