"""Ledgers of run directories: step 0 against the last evaluation, runs that differ in their seed alone taken together."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from statewise.errors import RunError
from statewise.evals.ledger import Ledger, Results, make_ledger
from statewise.evals.results import read_results

T = TypeVar("T")


def run_ledger(
    run: str | Path,
    *,
    base: str | Path | None = None,
    step: int | None = None,
    purposes: Mapping[str, str] | None = None,
) -> Ledger:
    """The ledger of one run.

    base: a run (its step 0) or a directory of `statewise eval --out`, in place of the run's own step 0. step: of the
    evaluation after training (default: the last). purposes: {task: purpose} where it is not the task's own.
    """
    return arm_ledger(str(run), [run], base=base, step=step, purposes=purposes)


def arm_ledger(
    name: str,
    runs: Sequence[str | Path],
    *,
    base: str | Path | None = None,
    step: int | None = None,
    purposes: Mapping[str, str] | None = None,
) -> Ledger:
    """One ledger of several runs, taken as seeds of one method. Raises RunError where a run was not evaluated twice."""
    alone = next((run for run in runs if base is None and is_evaluation(Path(run))), None)
    if alone is not None:
        raise RunError(
            f"{alone}: holds one evaluation, so there is no base to compare with; name one with --base RUN, or with "
            "--base DIR of `statewise eval MODEL --out DIR`."
        )
    pairs = [(read_base(base or run), last_results(run, step)) for run in runs]
    return make_ledger(name, pairs, purposes)


def same_but_seed(runs: Sequence[str | Path]) -> list[list[Path]]:
    """The runs, grouped by their recipe without its seed, in the order given; directories of `eval --out` stay alone."""
    groups: dict[str, list[Path]] = {}
    for run in map(Path, runs):
        if is_evaluation(run):
            groups.setdefault(str(run), []).append(run)
            continue
        try:
            recipe = tomllib.loads((run / "recipe.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"{run}: is no run directory, or its recipe.toml can't be read: {error}") from None
        recipe.pop("seed", None)
        groups.setdefault(json.dumps(recipe, sort_keys=True), []).append(run)
    return list(groups.values())


def is_evaluation(path: Path) -> bool:
    """Whether `statewise eval --out` wrote this directory, and no training."""
    return (path / "summary.json").is_file() and not (path / "run.json").is_file()


def repeated_seeds(runs: Sequence[Path]) -> list[int]:
    """Seeds that more than one of the runs has; such runs are no new evidence."""
    files = [run / "recipe.toml" for run in runs if not is_evaluation(run)]
    recipes = (tomllib.loads(file.read_text(encoding="utf-8")) for file in files)
    return list(repeated(int(recipe.get("seed", 0)) for recipe in recipes))


def repeated(items: Iterable[T]) -> dict[T, int]:
    """{item: how often it is there}, of those that are there more than once."""
    return {item: count for item, count in Counter(items).items() if count > 1}


def evaluated_steps(run: Path) -> dict[int, Path]:
    """Directories of the evaluations inside a run that were done to the end, by step."""
    from statewise.run import RunDir, steps_in

    found = steps_in(RunDir.open(run).path / "evals")
    return {step: place for step, place in found.items() if (place / "summary.json").is_file()}


def read_base(path: str | Path) -> Results:
    """The results of step 0 of a run, or of a directory of `statewise eval --out`."""
    path = Path(path)
    if not (path / "run.json").is_file():
        return read_results(path)
    found = evaluated_steps(path)
    if 0 not in found:
        raise RunError(
            f"{path}: has no evaluation of step 0 (eval.at_start = false?), so there is no base to compare with; name one "
            "with --base RUN, or with --base DIR of `statewise eval MODEL --out DIR`."
        )
    return read_results(found[0])


def last_results(path: str | Path, step: int | None = None) -> Results:
    """The results of a run's last evaluation after step 0 (or that of `step`), or of a directory of `eval --out`."""
    path = Path(path)
    if not (path / "run.json").is_file():
        return read_results(path)
    found = {number: directory for number, directory in evaluated_steps(path).items() if number > 0}
    if not found:
        raise RunError(f"{path}: has no evaluation after step 0; let it end, with eval.tasks in its recipe.")
    if step is not None and step not in found:
        raise RunError(f"{path}: has no evaluation of step {step}; it has {', '.join(map(str, found))}.")
    return read_results(found[max(found) if step is None else step])
