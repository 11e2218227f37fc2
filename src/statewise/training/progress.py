"""What a running training shows: a live line on a terminal, otherwise a plain line every few seconds. All on stderr."""

from __future__ import annotations

import os
import sys
import time
import warnings
from typing import Any, Protocol

PLAIN_SECONDS = 5.0  # between plain lines: a log of an hour stays under a thousand lines
SHOWN = ("loss", "nll", "phi", "lr", "grad_norm")
# Of what the policy wrote, and how the live line has it.
SAMPLED = {"reward": "reward", "accepted_share": "accepted", "completion_tokens": "length", "truncated_share": "cut"}


class Display(Protocol):
    """A context manager; `update` after each step with the share of the budget spent and the row of metrics."""

    def __enter__(self) -> Display: ...

    def __exit__(self, *exc: object) -> None: ...

    def update(self, progress: float, row: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...


def open_progress(label: str, quiet: bool = False) -> Display:
    """The display that fits: none when quiet, live on a terminal, plain lines elsewhere. Libraries' own are hidden."""
    hide_library_noise()
    if quiet:
        return Quiet()
    return Live(label) if sys.stderr.isatty() else Plain()


def hide_library_noise() -> None:
    """Bars of transformers and datasets, and a warning about what peft calls, would break the live line."""
    from transformers.utils.logging import disable_progress_bar

    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)


class Rate:
    """Trained tokens a second over the last steps, and the time left, from what was seen since the first update."""

    def __init__(self) -> None:
        self.first: tuple[float, float] | None = None
        self.total_tokens: float | None = None
        self.tokens_per_second: float | None = None
        self.seconds_left: float | None = None

    def see(self, progress: float, row: dict[str, Any], now: float) -> None:
        """`row` holds `total_tokens` so far and the `step_seconds` of the step; `now` in seconds of any clock."""
        total, before, seconds = row.get("total_tokens"), self.total_tokens, row.get("step_seconds")
        if total is not None and before is not None and seconds:
            rate, last = (total - before) / seconds, self.tokens_per_second
            self.tokens_per_second = rate if last is None else 0.8 * last + 0.2 * rate
        self.total_tokens = total
        if self.first is None:
            self.first = (progress, now - (seconds or 0.0))
            return
        done = progress - self.first[0]
        if done > 0:
            self.seconds_left = (now - self.first[1]) / done * max(0.0, 1.0 - progress)


class Quiet:
    """Shows nothing."""

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def update(self, progress: float, row: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...


class Plain:
    """`step=20 progress=0.400 loss=1.234 tokens_per_second=812 seconds_left=31`, at once and then every few seconds."""

    def __init__(self, every: float = PLAIN_SECONDS) -> None:
        self.every = every
        self.rate = Rate()
        self.last = float("-inf")

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def update(self, progress: float, row: dict[str, Any]) -> None:
        now = time.monotonic()
        self.rate.see(progress, row, now)
        if now - self.last < self.every and progress < 1.0:
            return
        self.last = now
        parts = [f"step={row.get('step', 0)}", f"progress={progress:.3f}"]
        parts += [f"{name}={row[name]:.6g}" for name in SHOWN if row.get(name) is not None]
        parts += [f"{name}={row[name]:.3g}" for name in SAMPLED if row.get(name) is not None]
        for name in ("tokens_per_second", "seconds_left"):
            value = getattr(self.rate, name)
            parts += [] if value is None else [f"{name}={value:.0f}"]
        self.say(" ".join(parts))

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Live:
    """A bar with step, loss, tokens a second and time left."""

    def __init__(self, label: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[facts]}"),
        )
        self.rate = Rate()
        self.bar = Progress(*columns, console=Console(stderr=True), transient=False)
        self.task = self.bar.add_task(label, total=1.0, facts="")

    def __enter__(self) -> Live:
        self.bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.bar.stop()

    def update(self, progress: float, row: dict[str, Any]) -> None:
        self.rate.see(progress, row, time.monotonic())
        facts = [f"step {row.get('step', 0)}"]
        facts += [f"loss {row['loss']:.4g}"] if row.get("loss") is not None else []
        facts += [f"{short} {row[name]:.3g}" for name, short in SAMPLED.items() if row.get(name) is not None]
        if self.rate.tokens_per_second is not None:
            facts.append(f"{self.rate.tokens_per_second:,.0f} tok/s")
        if self.rate.seconds_left is not None:
            facts.append(f"{clock(self.rate.seconds_left)} left")
        self.bar.update(self.task, completed=progress, facts="  ".join(facts))

    def say(self, text: str) -> None:
        self.bar.console.print(text, markup=False, highlight=False)


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
