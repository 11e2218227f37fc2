"""Work shared out to processes of one thread each: a decomposition a core beats a decomposition on all cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, TypeVar

from statewise.errors import RunError

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
Shared = TypeVar("Shared")
Job = TypeVar("Job")
Result = TypeVar("Result")


def each(
    work: Callable[[Shared, Job], Result], shared: Shared, jobs: Sequence[Job], workers: int
) -> Iterator[tuple[Job, Result]]:
    """(job, work(shared, job)) as they come: in this process for one worker, else in processes that got `shared` once.

    Raises RunError where a worker is killed; what `work` raises comes through.
    """
    if workers <= 1 or len(jobs) <= 1:
        for job in jobs:
            yield job, work(shared, job)
        return
    with one_thread_pool(min(workers, len(jobs)), (work, shared)) as pool:
        waiting = {pool.submit(_work, job): job for job in jobs}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BrokenProcessPool:
            raise RunError(
                "a worker was killed, most likely for want of memory; run the same command again with fewer --workers: "
                "what was finished is kept."
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def one_thread_pool(workers: int, shared: Any = None) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes have one thread whatever this one has: BLAS reads its number when it is loaded."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        with ProcessPoolExecutor(workers, get_context("spawn"), _start, (shared,)) as pool:
            yield pool
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


_shared: list[Any] = []


def _start(shared: Any) -> None:
    import torch

    torch.set_num_threads(1)
    _shared[:] = [shared]


def _work(job: Any) -> Any:
    work, shared = _shared[0]
    return work(shared, job)
