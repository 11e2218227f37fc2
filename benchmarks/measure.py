"""Timing contestants in turn, so that the machine's noise meets all of them, and the peak memory of each on its own."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def in_turn(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round for each contestant, after one unmeasured round; the order rotates."""
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        contestants[name]()
    for index in range(rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            started = time.perf_counter()
            contestants[name]()
            seconds[name].append(time.perf_counter() - started)
        print(f"  round {index + 1} of {rounds}", file=sys.stderr, flush=True)
    return seconds


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def growth(work: Callable[[int], int], sizes: Sequence[int]) -> None:
    """Prints seconds and tokens of more and more samples, and the slope of log seconds over log tokens.

    work(size): does so many samples; their tokens.
    """
    rows = []
    for size in sizes:
        started = time.perf_counter()
        tokens = work(size)
        rows.append((size, tokens, time.perf_counter() - started))
    told = [(n, t, f"{s:.2f}", f"{t / s:,.0f}") for n, t, s in rows]
    print(table(told, ("samples", "tokens", "seconds", "tokens/s")))
    slope = statistics.linear_regression([math.log(t) for _, t, _ in rows], [math.log(s) for *_, s in rows]).slope
    print(f"slope of log seconds over log tokens: {slope:.2f}")


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(values, base, strict=True))


def peak_bytes() -> int:
    """Largest resident set of this process so far (Linux; ru_maxrss would count the parent's, inherited through exec)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def peak_in_own_process(module: str, arguments: Sequence[str]) -> tuple[int, int]:
    """(bytes before, peak bytes) that `python -m module --peak ...` prints as its last line."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], check=True, capture_output=True, text=True, env=os.environ
    )
    before, peak = done.stdout.strip().splitlines()[-1].split()
    return int(before), int(peak)
