"""Pieces of a study on a Ray cluster or under Slurm. All machines must see the study's directory under the same path."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

from statewise.errors import MissingExtra
from statewise.study.plan import Plan
from statewise.study.worker import environment, remote_piece

RETRIES = 5  # of a piece whose node or process was lost; it goes on from its last checkpoint
GIB = 2**30
KEPT = ("STATEWISE_CACHE", "PYTHONPATH", "HF_HOME", "HF_HUB_OFFLINE")  # of the caller's environment


class RayWorkers:
    """Tasks with the study's resources. Uses the cluster of RAY_ADDRESS or of this machine, else starts one here."""

    def __init__(self, plan: Plan):
        try:
            import ray
        except ImportError:
            raise MissingExtra("ray", "ray", "--on ray") from None
        self._ray, self._plan = ray, plan
        self._started = not ray.is_initialized()
        if self._started:
            ray.init(log_to_driver=False, logging_level=logging.WARNING)
        wanted = plan.study.resources
        self._task = ray.remote(remote_piece)
        self._options: dict[str, Any] = {
            "num_cpus": wanted.cpus,
            "num_gpus": wanted.gpus,
            "memory": None if wanted.memory_gib is None else int(wanted.memory_gib * GIB),
            "max_retries": RETRIES,
            "runtime_env": {"env_vars": _variables(plan)},
        }
        self._lock = threading.Lock()
        self._running: set[Any] = set()

    def __call__(self, key: str) -> str | None:
        """Do a piece and wait for it; a lost node's piece is done again on another."""
        reference = self._task.options(name=key, **self._options).remote(*_arguments(self._plan), key)
        with self._lock:
            self._running.add(reference)
        try:
            error: str | None = self._ray.get(reference)
            return error
        except self._ray.exceptions.RayError as error:
            return f"ray gave the piece up: {str(error).strip().splitlines()[0]}"
        finally:
            with self._lock:
                self._running.discard(reference)

    def stop(self) -> None:
        """Interrupt what runs: it writes a checkpoint."""
        with self._lock:
            for reference in self._running:
                self._ray.cancel(reference)

    def close(self) -> None:
        if self._started:
            self._ray.shutdown()


class SlurmWorkers:
    """Jobs through submitit; `cluster`: "slurm", or "local" for processes of this machine."""

    def __init__(self, plan: Plan, cluster: str = "slurm"):
        try:
            import submitit
        except ImportError:
            raise MissingExtra("submitit", "slurm", "--on slurm") from None
        self._errors = submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError
        self._plan = plan
        self._executor = submitit.AutoExecutor(folder=plan.out / "logs" / "slurm", cluster=cluster)
        wanted = plan.study.resources
        memory = {} if wanted.memory_gib is None else {"mem_gb": wanted.memory_gib}
        self._executor.update_parameters(
            name=plan.name, cpus_per_task=wanted.cpus, gpus_per_node=int(wanted.gpus), **memory, **wanted.slurm
        )
        self._lock = threading.Lock()
        self._running: set[Any] = set()

    def __call__(self, key: str) -> str | None:
        """Submit a piece and wait for it."""
        with self._lock:
            job = self._executor.submit(_with_variables, _variables(self._plan), *_arguments(self._plan), key)
            self._running.add(job)
        try:
            error: str | None = job.result()
            return error
        except self._errors as error:
            return f"slurm job {job.job_id} failed: {str(error).strip().splitlines()[-1]}"
        finally:
            with self._lock:
                self._running.discard(job)

    def stop(self) -> None:
        """Cancel the jobs: they write a checkpoint where Slurm leaves them the time."""
        with self._lock:
            for job in self._running:
                job.cancel()

    def close(self) -> None: ...


def _with_variables(variables: dict[str, str], *arguments: Any) -> str | None:
    os.environ.update(variables)
    return remote_piece(*arguments)


def _arguments(plan: Plan) -> tuple[str, str, str, tuple[str, ...]]:
    return str(plan.file), str(plan.out), str(Path.cwd()), plan.overrides


def _variables(plan: Plan) -> dict[str, str]:
    """A worker's environment; the base's scores are kept where all machines see them."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return {"STATEWISE_CACHE": str((plan.out / "cache").resolve()), **kept, **environment(plan)}
