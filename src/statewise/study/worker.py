"""A process that does pieces of a study, one after another: `python -m statewise.study.worker FILE OUT [KEY=VALUE]...`.

Reads a key a line from stdin and answers with a line of JSON on stdout, {"key", "error"}; what the pieces print goes to
OUT/logs/KEY.log. When stdin closes, since the study ended or was killed, the run at hand writes a checkpoint and stops.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from statewise.errors import StatewiseError
from statewise.study.plan import Plan, make_plan
from statewise.study.work import execute

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def main(file: str, out: str, *overrides: str) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the study passes Ctrl-C on as one SIGTERM
    keys: SimpleQueue[str | None] = SimpleQueue()
    busy = threading.Event()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    plan = make_plan(file, out, overrides)
    threading.Thread(target=_listen, args=(keys, busy), daemon=True).start()
    import statewise.training.loop
    import statewise.training.world  # noqa: F401

    while (key := keys.get()) is not None:
        busy.set()
        error = attempt(plan, key)
        busy.clear()
        answers.write(json.dumps({"key": key, "error": error}) + "\n")
        answers.flush()


def _listen(keys: SimpleQueue[str | None], busy: threading.Event) -> None:
    for line in sys.stdin:
        keys.put(line.strip())
    keys.put(None)
    if busy.is_set():  # nobody waits for the piece at hand
        os.kill(os.getpid(), signal.SIGTERM)


def environment(plan: Plan) -> dict[str, str]:
    """Variables of a worker: as many threads as a run has cores, so that the number of jobs changes no result."""
    threads = {name: str(plan.study.resources.cpus) for name in THREAD_VARIABLES}
    return {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false", **threads}


def attempt(plan: Plan, key: str) -> str | None:
    """The error in words, None where the piece is done; what it prints goes to its log."""
    log = plan.out / "logs" / f"{key}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with _printing_to(log):
        try:
            execute(plan, key)
        except StatewiseError as error:
            return str(error)
        except Exception as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {error} (traceback: {log})"
    return None


@contextmanager
def _printing_to(log: Path) -> Iterator[None]:
    """Everything that is written to stdout and stderr, by libraries too, goes to the end of a file."""
    saved = [(number, os.dup(number)) for number in (1, 2)]
    with log.open("a", encoding="utf-8") as file:
        for number, _ in saved:
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in saved:
            os.dup2(copy, number)
            os.close(copy)


def remote_piece(file: str, out: str, directory: str, overrides: Sequence[str], key: str) -> str | None:
    """A piece on another machine that sees the same files; `directory`: where the study was started."""
    os.chdir(directory)
    return attempt(make_plan(file, out, overrides), key)


if __name__ == "__main__":
    main(*sys.argv[1:])
