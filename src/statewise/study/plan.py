"""From a study to its runs: every arm and seed as a recipe, in an order in which teachers come before their students.

A text `arm:NAME` in a recipe stands for the run of that arm with the same seed, `arm:NAME@0` for its run with seed 0.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from statewise.errors import RecipeError, nearest
from statewise.overrides import apply_overrides, to_toml
from statewise.recipe import Recipe, find_recipe
from statewise.study.spec import Arm, Study, load

REFERENCE = re.compile(r"arm:([^@]+?)(?:@(\d+))?")
BASE = "base"


@dataclass(frozen=True)
class Job:
    """One run of a study. `recipe` still holds `arm:...` where another run is meant.

    identity: a hash of the recipe and of the runs it needs, so that the same work has the same directory.
    """

    arm: str
    seed: int
    recipe: Recipe
    needs: tuple[tuple[str, int], ...] = ()
    identity: str = ""
    about: str = ""
    own_budget: bool = False

    @property
    def key(self) -> str:
        return f"{self.arm}-seed{self.seed}-{self.identity}"


@dataclass(frozen=True)
class Plan:
    """All runs of a study, teachers first: in `out/runs/`, and in `out/base/` a run of no step for each untrained model."""

    name: str
    file: Path
    out: Path
    study: Study
    jobs: tuple[Job, ...]
    overrides: tuple[str, ...] = ()

    @cached_property
    def by_key(self) -> dict[str, Job]:
        return {job.key: job for job in self.jobs}

    @cached_property
    def by_arm(self) -> dict[tuple[str, int], Job]:
        return {(job.arm, job.seed): job for job in self.jobs}

    def path(self, key: str) -> Path:
        """Where the run called `key` is, or will be."""
        return self.out / (BASE if key in self.bases else "runs") / key

    def base_of(self, job: Job) -> tuple[str, Recipe]:
        """Key and recipe, of no step, of the untrained model that a run is compared with.

        A run that starts from another run's end is compared with what that one is compared with.
        """
        for name, seed in references([job.recipe.model.path]):
            return self.base_of(self.by_arm[name, job.seed if seed is None else seed])
        plain, adapter = job.recipe.to_plain(), job.recipe.model.adapter
        model = {k: v for k, v in plain.get("model", {}).items() if k not in ("adapter", "gradient_checkpointing")}
        told = [model, adapter and adapter.path, plain.get("eval", {})]
        key = f"{BASE}-{hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]}"
        return key, _untrained(job.recipe)

    @cached_property
    def bases(self) -> dict[str, Recipe]:
        """The untrained models by key."""
        return dict(self.base_of(job) for job in reversed(self.jobs))

    def to_plain(self) -> dict[str, Any]:
        """What tables and reports need, as JSON holds it; paths are relative to `out`."""
        study = self.study.model_dump(mode="json", exclude={"arms", "axes", "set", "tasks"})
        return {"schema": 1, "name": self.name, **study, "runs": [self._row(job) for job in self.jobs]}

    def _row(self, job: Job) -> dict[str, Any]:
        return {
            "arm": job.arm,
            "seed": job.seed,
            "run": str(self.path(job.key).relative_to(self.out)),
            "base": str(self.path(self.base_of(job)[0]).relative_to(self.out)),
            "needs": [self.by_arm[need].key for need in job.needs],
            "about": job.about,
            "own_budget": job.own_budget,
            "budget": job.recipe.budget.model_dump(exclude_none=True),
            "method": job.recipe.explain(),
        }


def _untrained(recipe: Recipe) -> Recipe:
    """The recipe's model and evaluation alone: an arm's missing data or teacher must not keep the other arms from their base."""
    least = Recipe.from_plain(
        {
            "source": {"kind": "dataset", "data": "tiny:math", "count": 1},
            "signal": ["gold"],
            "objective": [{"loss": "nll"}],
            "budget": {"max_steps": 0},
        }
    )
    kept = ("model", "eval", "checkpoint", "plugins", "seed")
    return recipe.model_copy(update={name: getattr(least, name) for name in Recipe.model_fields if name not in kept})


def make_plan(file: str | Path, out: str | Path | None = None, overrides: Sequence[str] = ()) -> Plan:
    """The plan of a study file; `out` is by default the file's path without `.toml`. Overrides are of the study's keys.

    Raises RecipeError naming the arm, for a recipe that is void, a reference to no arm, and arms that wait for each other.
    """
    path = Path(file)
    study = load(path, overrides)
    arms = _expand(study) or {find_recipe(_beside(study.base, path)).stem: Arm()}
    jobs = [_job(study, path, name, arm, seed) for name, arm in arms.items() for seed in (arm.seeds or study.seeds)]
    known = {(job.arm, job.seed) for job in jobs}
    linked = [_linked(job, known, list(arms)) for job in jobs]
    where = Path(out) if out is not None else path.with_suffix("")
    plan = Plan(path.stem, path, where, study, _identified(linked), tuple(overrides))
    _check_tasks(plan)
    if study.versus is not None and study.versus not in arms:
        raise RecipeError(f"{path}: versus: no arm '{study.versus}'{nearest(study.versus, arms)}")
    return plan


def _expand(study: Study) -> dict[str, Arm]:
    """Arms by name, a combination of axis values being an arm of its own."""
    named = study.arms or ({"arm": Arm()} if study.axes else {})
    found = {}
    for name, arm in named.items():
        axes = arm.axes if arm.alone else {**study.axes, **arm.axes}
        for values in product(*axes.values()):
            chosen = dict(zip(axes, values, strict=True))
            suffix = "".join(f"-{key.split('.')[-1]}={_word(value)}" for key, value in chosen.items())
            overrides = [f"{key}={_toml(value)}" for key, value in chosen.items()]
            label = suffix[1:] if not study.arms else name + suffix
            if label in found:
                raise RecipeError(f"axes: two arms are called '{label}'; use axes with different last keys or values.")
            found[label] = arm.model_copy(update={"set": [*arm.set, *overrides], "axes": {}})
    return found


def _word(value: Any) -> str:
    return re.sub(r"[^A-Za-z0-9_.+]+", "_", str(value)).strip("_") or "none"


def _toml(value: Any) -> str:
    return "none" if value is None else to_toml({"value": value}).removeprefix("value = ").strip()


def _beside(name: str, file: Path) -> str:
    """A recipe beside the study, else the name as it is."""
    own = file.parent / name
    return str(own) if own.is_file() else name


def _job(study: Study, file: Path, name: str, arm: Arm, seed: int) -> Job:
    found = find_recipe(_beside(arm.recipe or study.base, file))
    try:
        plain = tomllib.loads(found.read_text(encoding="utf-8"))
        budget = arm.budget or study.budget
        if budget is not None:
            plain["budget"] = budget.model_dump(exclude_none=True)
        plain["seed"] = seed
        if study.tasks is not None:
            plain.setdefault("eval", {})["tasks"] = study.tasks
        plain = apply_overrides(plain, arm.set if arm.alone else [*study.set, *arm.set], list(Recipe.model_fields))
        recipe = Recipe.from_plain(plain, name=name, base_dir=found.parent)
    except ValueError as error:
        raise RecipeError(f"{found}: is not valid TOML: {error}") from None
    except RecipeError as error:
        raise RecipeError(f"{file}: arms.{name}: {error}") from None
    return Job(name, seed, recipe, about=arm.about, own_budget=arm.budget is not None)


def references(value: Any) -> Iterator[tuple[str, int | None]]:
    """(arm, seed or None) of every `arm:...` in a plain recipe."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from references(item)
    match = REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if match is not None:
        yield match[1], None if match[2] is None else int(match[2])


def resolve(value: Any, paths: Mapping[tuple[str, int | None], str]) -> Any:
    """A plain recipe with a path in place of every `arm:...`."""
    if isinstance(value, Mapping):
        return {key: resolve(item, paths) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [resolve(item, paths) for item in value]
    match = REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return value if match is None else paths[match[1], None if match[2] is None else int(match[2])]


def _linked(job: Job, known: set[tuple[str, int]], arms: list[str]) -> Job:
    needs = []
    for name, seed in references(job.recipe.to_plain()):
        wanted = (name, job.seed if seed is None else seed)
        if wanted not in known:
            problem = (
                f"there is no arm '{name}'{nearest(name, arms)}"
                if name not in arms
                else f"arm '{name}' has no seed {wanted[1]}; give it that seed, or name one of its own: arm:{name}@SEED"
            )
            raise RecipeError(f"arms.{job.arm}: refers to 'arm:{name}', but {problem}")
        needs.append(wanted)
    return replace(job, needs=tuple(dict.fromkeys(needs)))


def _identified(jobs: list[Job]) -> tuple[Job, ...]:
    """Jobs with their identities, each after those that it needs."""
    waiting = {(job.arm, job.seed): job for job in jobs}
    done: dict[tuple[str, int], Job] = {}
    while waiting:
        ready = [job for job in waiting.values() if all(need in done for need in job.needs)]
        if not ready:
            names = sorted({arm for arm, _ in waiting})
            wait = "waits for itself" if len(names) == 1 else "wait for each other"
            raise RecipeError(f"arms: {', '.join(names)} {wait} (arm:...).")
        for job in ready:
            told = [job.recipe.identity, *(done[need].identity for need in job.needs)]
            identity = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:8]
            done[job.arm, job.seed] = replace(job, identity=identity)
            del waiting[job.arm, job.seed]
    return tuple(done.values())


def _check_tasks(plan: Plan) -> None:
    """Every arm on the same tasks, and the named ones among them."""
    from statewise.evals.results import task_name

    listed = {job.arm: [task.to_plain() for task in job.recipe.eval.tasks] for job in plan.jobs}
    first = plan.jobs[0]
    for arm, tasks in listed.items():
        if tasks != listed[first.arm]:
            raise RecipeError(
                f"{plan.file}: arms.{arm}: has other eval.tasks than arms.{first.arm}, so that they can't be compared; give "
                "`tasks = [...]` in the study."
            )
    names = [task_name(task) for task in first.recipe.eval.tasks]  # type: ignore[arg-type]
    for field, name in [("target", plan.study.target), *(("retention", n) for n in plan.study.retention or [])]:
        if name not in names:
            raise RecipeError(f"{plan.file}: {field}: no task '{name}'{nearest(name, names)}")
