"""The order of pieces, and what a failure holds up."""

import threading
import time

import pytest

from statewise.study.schedule import Event, run_all

NEEDS = {"base": [], "teacher": [], "student": ["teacher"], "grandchild": ["student"], "alone": []}


class Recorder:
    """Does nothing, remembers everything."""

    def __init__(self, bad: str = "", stop_at: str = "") -> None:
        self.bad, self.stop_at = bad, stop_at
        self.done: list[str] = []
        self.at_once = self.most = self.stopped = self.closed = 0
        self.lock = threading.Lock()

    def __call__(self, key: str) -> str | None:
        with self.lock:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        time.sleep(0.01)
        with self.lock:
            self.at_once -= 1
            self.done.append(key)
        return "broken" if key == self.bad else None

    def stop(self) -> None:
        self.stopped += 1

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("slots", [1, 2, 9])
def test_all_are_done_in_order(slots: int) -> None:
    work = Recorder()
    assert run_all(NEEDS, work, slots, lambda event: None) == {}
    assert sorted(work.done) == sorted(NEEDS)
    assert work.done.index("teacher") < work.done.index("student") < work.done.index("grandchild")
    assert work.most <= slots
    assert work.closed == 1 and work.stopped == 0


def test_a_failure_holds_up_only_what_needs_it() -> None:
    work, events = Recorder(bad="teacher"), list[Event]()
    failed = run_all(NEEDS, work, 2, events.append)
    assert failed == {
        "teacher": "broken",
        "student": "needs teacher, which failed",
        "grandchild": "needs student, which failed",
    }
    assert sorted(work.done) == ["alone", "base", "teacher"]
    assert [e.key for e in events if e.what == "blocked"] == ["student", "grandchild"]


def test_what_is_done_already_is_not_waited_for() -> None:
    work = Recorder()
    assert run_all({"student": ["teacher"]}, work, 1, lambda event: None) == {}
    assert work.done == ["student"]


def test_an_interruption_stops_the_workers() -> None:
    work = Recorder()

    def tell(event: Event) -> None:
        if event.what == "done":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(NEEDS, work, 1, tell)
    assert work.stopped == 1 and work.closed == 1
    assert len(work.done) == 1
