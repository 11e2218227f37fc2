"""Who scores the chunks: this process, several of this machine, or Ray workers. Results come in the order of the chunks."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from statewise.errors import MissingExtra
from statewise.onpolicy.chunks import ChunkScorer, Numbered, Report
from statewise.onpolicy.records import Chunk
from statewise.onpolicy.settings import Engine, ScoreSettings

Task = tuple[int, Numbered]  # number of the chunk, its rows
Result = tuple[int, Chunk]
AHEAD = 2  # chunks a process that wait, so that none idles and few are held

_scorer: ChunkScorer | None = None  # of a worker process


def scored(settings: ScoreSettings, engine: Engine, tasks: Iterable[Task], report: Report) -> Iterator[Result]:
    """Each chunk's result. `report(tokens)`: as they are read by the model, or a chunk at a time from workers."""
    if engine.on == "ray":
        yield from _by_ray(settings, engine, tasks, report)
    elif engine.processes > 1:
        yield from _by_processes(settings, engine, tasks, report)
    else:
        scorer: ChunkScorer | None = None
        for number, rows in tasks:
            scorer = scorer or ChunkScorer(settings, engine)
            yield number, scorer.score(rows, report)


def threads_of(engine: Engine) -> Engine:
    """The engine with the cores shared out among its processes."""
    if engine.threads is not None or engine.processes == 1:
        return engine
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return engine.model_copy(update={"threads": max(1, cores // engine.processes)})


def _by_processes(settings: ScoreSettings, engine: Engine, tasks: Iterable[Task], report: Report) -> Iterator[Result]:
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    context = get_context("spawn")  # a forked copy of torch's threads would hang
    numbers = context.Queue()
    for index in range(engine.processes):
        numbers.put(index)
    start = (settings, threads_of(engine), numbers)
    pool = ProcessPoolExecutor(engine.processes, mp_context=context, initializer=_start, initargs=start)
    with pool:
        try:
            yield from _in_order(
                tasks, engine.processes * AHEAD, lambda rows: pool.submit(_work, rows), lambda f: f.result(), report
            )
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _start(settings: ScoreSettings, engine: Engine, numbers: Any) -> None:
    """Load the model in a worker process; it ends when its parent does, however that ends."""
    global _scorer
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _scorer = ChunkScorer(settings, engine, numbers.get())


def _die_with_parent() -> None:
    from multiprocessing import parent_process

    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(rows: Numbered) -> Chunk:
    assert _scorer is not None
    return _scorer.score(rows)


def _by_ray(settings: ScoreSettings, engine: Engine, tasks: Iterable[Task], report: Report) -> Iterator[Result]:
    try:
        import ray
    except ImportError:
        raise MissingExtra("ray", "ray", "--on ray") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    gpus = 1 if ray.cluster_resources().get("GPU") else 0
    actor: Any = ray.remote(num_gpus=gpus, num_cpus=1)(ChunkScorer)
    actors = [actor.remote(settings, threads_of(engine)) for _ in range(engine.processes)]
    turns = deque(actors)

    def submit(rows: Numbered) -> Any:
        turns.rotate(-1)
        return turns[0].score.remote(rows)

    try:
        yield from _in_order(tasks, engine.processes * AHEAD, submit, ray.get, report)
    finally:
        for one in actors:
            ray.kill(one)


def _in_order(
    tasks: Iterable[Task], ahead: int, submit: Callable[[Numbered], Any], wait: Callable[[Any], Chunk], report: Report
) -> Iterator[Result]:
    """At most `ahead` chunks on their way at a time."""
    waiting: deque[tuple[int, Any]] = deque()
    source = iter(tasks)
    while True:
        while len(waiting) < ahead and (task := next(source, None)) is not None:
            waiting.append((task[0], submit(task[1])))
        if not waiting:
            return
        number, future = waiting.popleft()
        chunk = wait(future)
        report(int(chunk.facts["tokens"]))
        yield number, chunk
