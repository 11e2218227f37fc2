"""What `statewise study run` shows: a line when a run starts and ends; on a terminal a bar, and where each run is."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statewise.cli.output import say

if TYPE_CHECKING:
    from statewise.study.plan import Plan
    from statewise.study.schedule import Event

REFRESH_SECONDS = 1.0
TAIL_BYTES = 8192  # of metrics.jsonl: more than its last row


class Teller:
    """Called with every event of the study; a context manager."""

    def __init__(self, plan: Plan, total: int):
        self.plan, self.total = plan, total
        self.since: dict[str, float] = {}
        self.ended = 0
        self.bar = _Bar(self) if sys.stderr.isatty() and total else None

    def __enter__(self) -> Teller:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, event: Event) -> None:
        if event.what == "started":
            self.since[event.key] = time.monotonic()
            return self._say(f"  start   {event.key}")
        took = time.monotonic() - self.since.pop(event.key, time.monotonic())
        self.ended += 1
        words = {"done": f"done    {event.key} in {took:.0f} s", "failed": f"FAILED  {event.key}: {event.error}"}
        self._say(f"  {words.get(event.what, f'left    {event.key}: {event.error}')} ({self.ended}/{self.total})")

    def _say(self, text: str) -> None:
        if self.bar is None:
            say(text)
        else:
            self.bar.progress.console.print(text, markup=False, highlight=False)


class _Bar:
    """The share of runs that have ended, the time that is left, and the step of every run at work."""

    def __init__(self, teller: Teller):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.teller = teller
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[at_work]}"))
        self.progress = Progress(*columns, console=Console(stderr=True))
        self.task = self.progress.add_task("runs", total=teller.total, at_work="")
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._refresh, daemon=True)

    def start(self) -> None:
        self.progress.start()
        self.thread.start()

    def stop(self) -> None:
        self.over.set()
        self.thread.join()
        self.progress.stop()

    def _refresh(self) -> None:
        while not self.over.wait(REFRESH_SECONDS):
            at_work = [where(self.teller.plan.path(key), key) for key in list(self.teller.since)]
            self.progress.update(self.task, completed=self.teller.ended, at_work="  ".join(at_work))


def where(path: Path, key: str) -> str:
    """`arm-seed0 step 12 loss 0.3` of a run at work."""
    row = last_row(path / "metrics.jsonl")
    loss = f" loss {row['loss']:.3g}" if isinstance(row.get("loss"), int | float) else ""
    return f"{key.rpartition('-')[0]} step {row.get('step', 0)}{loss}"


def last_row(file: Path) -> dict[str, Any]:
    """The last whole row of a file of JSON rows; empty where there is none."""
    try:
        with file.open("rb") as handle:
            handle.seek(max(0, handle.seek(0, 2) - TAIL_BYTES))
            lines = handle.read().split(b"\n")[:-1]  # what follows the last line end is not whole yet
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    except (OSError, ValueError, IndexError):
        return {}
