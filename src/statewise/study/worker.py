"""A process that does pieces of a study, one after another: `python -m statewise.study.worker FILE OUT`.

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
from queue import SimpleQueue

from statewise.errors import StatewiseError
from statewise.study.plan import Plan, make_plan
from statewise.study.work import execute


def main(file: str, out: str) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the study passes Ctrl-C on as one SIGTERM
    keys: SimpleQueue[str | None] = SimpleQueue()
    busy = threading.Event()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    plan = make_plan(file, out)
    threading.Thread(target=_listen, args=(keys, busy), daemon=True).start()
    import statewise.training.loop
    import statewise.training.world  # noqa: F401

    while (key := keys.get()) is not None:
        busy.set()
        error = _attempt(plan, key)
        busy.clear()
        answers.write(json.dumps({"key": key, "error": error}) + "\n")
        answers.flush()


def _listen(keys: SimpleQueue[str | None], busy: threading.Event) -> None:
    for line in sys.stdin:
        keys.put(line.strip())
    keys.put(None)
    if busy.is_set():  # nobody waits for the piece at hand
        os.kill(os.getpid(), signal.SIGTERM)


def _attempt(plan: Plan, key: str) -> str | None:
    """The error in words, None where the piece is done."""
    log = plan.out / "logs" / f"{key}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        execute(plan, key)
    except StatewiseError as error:
        return str(error)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error} (traceback: {log})"
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
