"""How far a pass through data is: a live line on a terminal, otherwise a plain line every few seconds. On stderr."""

from __future__ import annotations

import sys
import time

PLAIN_SECONDS, LIVE_SECONDS = 5.0, 0.2


class Meter:
    """Counts, and shows nothing."""

    def __init__(self) -> None:
        self.total_rows: int | None = None
        self.total_tokens: int | None = None
        self.done_rows = self.done_tokens = self.new_rows = self.new_tokens = 0
        self.began: float | None = None

    def start(self, rows: int | None, tokens: int | None = None) -> None:
        """A pass begins: how much there is in all, where that is known."""
        self.done_rows = self.done_tokens = self.new_rows = self.new_tokens = 0
        self.total_rows, self.total_tokens, self.began = rows, tokens, time.monotonic()
        self.show()

    def known(self, rows: int, tokens: int) -> None:
        """What an earlier run did."""
        self.done_rows, self.done_tokens = self.done_rows + rows, self.done_tokens + tokens

    def rows(self, count: int) -> None:
        self.done_rows, self.new_rows = self.done_rows + count, self.new_rows + count
        self.show()

    def tokens(self, count: int) -> None:
        if self.began is None or not self.new_tokens:
            self.began = self.began or time.monotonic()
        self.done_tokens, self.new_tokens = self.done_tokens + count, self.new_tokens + count
        self.show()

    @property
    def tokens_per_second(self) -> float | None:
        seconds = 0.0 if self.began is None else time.monotonic() - self.began
        return self.new_tokens / seconds if self.new_tokens and seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """By tokens where their number is known, else by rows."""
        seconds = 0.0 if self.began is None else time.monotonic() - self.began
        if self.total_tokens is not None and self.new_tokens:
            return seconds * (self.total_tokens - self.done_tokens) / self.new_tokens
        if self.total_rows is not None and self.new_rows:
            return seconds * (self.total_rows - self.done_rows) / self.new_rows
        return None

    def line(self) -> str:
        of = "" if self.total_rows is None else f" of {self.total_rows:,}"
        parts = [f"{self.done_rows:,}{of} rows", f"{self.done_tokens:,} tokens"]
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.seconds_left is not None:
            parts.append(f"{duration(self.seconds_left)} left")
        return ", ".join(parts)

    def show(self) -> None: ...

    def say(self, text: str) -> None: ...

    def stop(self) -> None: ...


class Shown(Meter):
    """Shows what `Meter` counts."""

    def __init__(self, label: str):
        super().__init__()
        self.label = label
        self.live = sys.stderr.isatty()
        self.last, self.width = 0.0, 0

    def say(self, text: str) -> None:
        self._print(text, ends=True)

    def show(self, *, ends: bool = False) -> None:
        now = time.monotonic()
        if ends or now - self.last >= (LIVE_SECONDS if self.live else PLAIN_SECONDS):
            self.last = now
            self._print(f"{self.label}: {self.line()}", ends=ends or not self.live)

    def stop(self) -> None:
        self.show(ends=True)

    def _print(self, text: str, *, ends: bool) -> None:
        start = "\r" if self.live else ""
        padded = text.ljust(self.width) if self.live else text
        self.width = 0 if ends else len(text)
        print(start + padded, end="\n" if ends else "", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """`42 s`, `3 min`, `2 h 5 min`"""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
