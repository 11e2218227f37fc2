"""Worker processes on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from queue import SimpleQueue
from typing import Any

from statewise.study.plan import Plan
from statewise.study.worker import environment


class LocalWorkers:
    """So many workers, started at once; each imports torch once and does many pieces, and is replaced when it dies."""

    def __init__(self, plan: Plan, count: int):
        self.plan = plan
        self._all: list[subprocess.Popen[str]] = []
        self._idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        for _ in range(count):
            self._idle.put(self._start())

    def __call__(self, key: str) -> str | None:
        """Do a piece; the error in words, None where there was none."""
        worker = self._idle.get()
        if worker.poll() is not None:
            worker = self._start()
        answer = _ask(worker, key)
        self._idle.put(worker)
        if answer:
            error: str | None = json.loads(answer)["error"]
            return error
        return f"the process ended with {_ending(worker.wait())} (log: {self.plan.out / 'logs' / key}.log)"

    def _start(self) -> subprocess.Popen[str]:
        plan = self.plan
        command = [sys.executable, "-m", "statewise.study.worker", str(plan.file), str(plan.out), *plan.overrides]
        with (self.plan.out / "logs" / "workers.log").open("a") as log:
            options: dict[str, Any] = {
                "text": True,
                "start_new_session": True,
                "env": {**os.environ, **environment(self.plan)},
                "stderr": log,
            }
            worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
        self._all.append(worker)
        return worker

    def stop(self) -> None:
        """Ask the pieces at hand to write a checkpoint and end."""
        for worker in self._all:
            if worker.poll() is None:
                worker.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Wait for the workers to end."""
        for worker in self._all:
            if worker.stdin is not None:
                try:
                    worker.stdin.close()
                except OSError:
                    continue
        for worker in self._all:
            worker.wait()


def _ask(worker: subprocess.Popen[str], key: str) -> str:
    """The worker's answer; empty where it died."""
    assert worker.stdin is not None and worker.stdout is not None
    try:
        worker.stdin.write(key + "\n")
        worker.stdin.flush()
        return worker.stdout.readline()
    except OSError:
        return ""


def _ending(code: int) -> str:
    if code >= 0:
        return f"code {code}"
    try:
        return signal.Signals(-code).name + (" (out of memory?)" if code == -signal.SIGKILL else "")
    except ValueError:
        return f"signal {-code}"
