"""Running a study: what is left of its plan, on the workers chosen."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from statewise.errors import RecipeError, RunError
from statewise.files import atomic_write, to_json
from statewise.run import RunDir
from statewise.study.plan import Plan
from statewise.study.schedule import Event, Workers, run_all
from statewise.study.work import is_done

ON = ("local", "ray", "slurm")


def run_study(
    plan: Plan,
    *,
    jobs: int | None = None,
    on: str = "local",
    tell: Callable[[Event], None] = lambda event: None,
    work: Workers | None = None,
) -> dict[str, str]:
    """Do what is not done yet; returns {piece: error} of what failed.

    jobs: pieces at a time; default: as many as the resources of a run fit into the machine's cores, on a cluster all.
    Raises MissingExtra for a cluster whose package is absent, and RunError where another process runs this study.
    """
    (plan.out / "logs").mkdir(parents=True, exist_ok=True)
    with _lock(plan.out):
        atomic_write(plan.out / "plan.json", to_json(plan.to_plain(), indent=2) + "\n")
        needs = left_to_do(plan)
        started = time.perf_counter()
        if not needs:
            return {}
        # A cluster has a queue of its own.
        slots = min(jobs or (default_jobs(plan) if on == "local" else len(needs)), len(needs))
        before = sum(_worked(plan.path(key)) for key in needs)
        failed = run_all(needs, work or _workers(plan, on, slots), slots, tell)
        worked = sum(_worked(plan.path(key)) for key in needs) - before
        _note(plan.out, time.perf_counter() - started, worked, slots, failed)
    return failed


def left_to_do(plan: Plan) -> dict[str, list[str]]:
    """{piece: the pieces that it needs}, without what is done; first come those that others wait for."""
    found: dict[str, list[str]] = {key: [] for key in plan.bases if not is_done(plan, key)}
    wanted = {need for job in plan.jobs for need in job.needs}
    for job in sorted(plan.jobs, key=lambda job: (job.arm, job.seed) not in wanted):
        if not is_done(plan, job.key):
            # The base comes first, so that the others find its scores in the cache.
            found[job.key] = [plan.base_of(job)[0], *(plan.by_arm[need].key for need in job.needs)]
    return found


def default_jobs(plan: Plan) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // plan.study.resources.cpus)


def _workers(plan: Plan, on: str, slots: int) -> Workers:
    if on == "local":
        from statewise.study.local import LocalWorkers

        return LocalWorkers(plan, slots)
    if on == "ray":
        from statewise.study.clusters import RayWorkers

        return RayWorkers(plan)
    if on == "slurm":
        from statewise.study.clusters import SlurmWorkers

        return SlurmWorkers(plan)
    raise RecipeError(f"--on: received {on!r}, expected one of {', '.join(ON)}.")


def _worked(path: Path) -> float:
    """Seconds that a run has spent in steps (sampling and teachers are part of them) and in evaluations."""
    rows = RunDir(path).metrics()
    return sum(row.get("step_seconds", 0.0) + row.get("eval_seconds", 0.0) for row in rows)


def _note(out: Path, seconds: float, worked: float, slots: int, failed: dict[str, str]) -> None:
    """A line in study.jsonl: how long this call took, what failed in it, and the share of time that was not work."""
    row = {"seconds": round(seconds, 2), "slots": slots, "overhead": round(1 - worked / (seconds * slots), 4)}
    with (out / "study.jsonl").open("a", encoding="utf-8") as file:
        file.write(to_json({**row, "failed": failed}) + "\n")


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    with (out / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{out}: another process runs this study; wait for it, or choose another --out.") from None
        yield
