"""Which piece of a study is done when: teachers before students, several at a time, failures apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Literal, Protocol


class Workers(Protocol):
    """Where pieces are done: here, on Ray, on Slurm. `__call__` is used by several threads at once."""

    def __call__(self, key: str) -> str | None:
        """Do a piece and wait for it; the error in words, None where there was none."""
        ...

    def stop(self) -> None:
        """Ask what is at hand to end soon, resumable."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


@dataclass(frozen=True)
class Event:
    """What happened to a piece; `error`: why it failed, or which piece that it needs did."""

    key: str
    what: Literal["started", "done", "failed", "blocked"]
    error: str | None = None


def run_all(
    needs: Mapping[str, Sequence[str]], work: Workers, slots: int, tell: Callable[[Event], None]
) -> dict[str, str]:
    """Do all pieces; returns {key: error} of those that failed or wait for one that did.

    needs: {piece: pieces that must be done before}; what is not itself a piece counts as done.
    """
    waiting = {key: [need for need in wanted if need in needs] for key, wanted in needs.items()}
    failed: dict[str, str] = {}
    done: set[str] = set()
    running: dict[Future[str | None], str] = {}
    with ThreadPoolExecutor(slots) as pool:
        try:
            while waiting or running:
                _drop_blocked(waiting, failed, tell)
                for key in [k for k, wanted in waiting.items() if done.issuperset(wanted)][: slots - len(running)]:
                    del waiting[key]
                    tell(Event(key, "started"))
                    running[pool.submit(work, key)] = key
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    key = running.pop(future)
                    error = future.result()
                    tell(Event(key, "failed" if error else "done", error))
                    if error:
                        failed[key] = error
                    else:
                        done.add(key)
        except BaseException:
            work.stop()
            raise
        finally:
            work.close()
    return failed


def _drop_blocked(waiting: dict[str, list[str]], failed: dict[str, str], tell: Callable[[Event], None]) -> None:
    while blocked := {key: need for key, wanted in waiting.items() for need in wanted if need in failed}:
        for key, need in blocked.items():
            failed[key] = f"needs {need}, which failed"
            tell(Event(key, "blocked", failed[key]))
            del waiting[key]
