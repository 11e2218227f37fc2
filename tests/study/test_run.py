"""Studies that really train: idempotent, resumed after a kill, failures reported."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from statewise.errors import DataError, RunError
from statewise.study.plan import make_plan
from statewise.study.results import read_study
from statewise.study.run import left_to_do, run_study
from statewise.study.schedule import Event
from statewise.study.table import table
from statewise.study.work import execute


class Here:
    """Does the pieces in this process."""

    def __init__(self, file: Path, bad: str = "") -> None:
        self.plan, self.bad = make_plan(file), bad

    def __call__(self, key: str) -> str | None:
        if self.bad and key.startswith(self.bad):
            return "made to fail"
        execute(self.plan, key)
        return None

    def stop(self) -> None: ...

    def close(self) -> None: ...


def test_a_study_is_done_once(runnable: Path) -> None:
    plan, events = make_plan(runnable), list[Event]()
    assert run_study(plan, jobs=1, work=Here(runnable), tell=events.append) == {}
    assert [e.key.split("-")[0] for e in events if e.what == "done"][1:] == ["stress", "mild", "student"]
    assert left_to_do(plan) == {}
    again = list[Event]()
    assert run_study(plan, jobs=1, work=Here(runnable), tell=again.append) == {}
    assert again == []
    rows = table(read_study(plan.out))
    assert [row["arm"] for row in rows] == ["base", "mild", "stress", "student"]
    student = plan.path(plan.by_arm["student", 0].key)
    assert str(plan.path(plan.by_arm["stress", 0].key)) in (student / "recipe.toml").read_text()


def test_an_arm_without_its_data_leaves_the_base_to_the_others(runnable: Path) -> None:
    text = runnable.read_text().replace(
        "[arms.mild]", '[arms.mild]\nset = [\'source={kind="dataset",data="none.jsonl"}\']'
    )
    runnable.write_text(text.replace("seeds = [0, 1]", "seeds = [0]"))

    class Told(Here):
        def __call__(self, key: str) -> str | None:
            try:
                return super().__call__(key)
            except DataError as error:
                return str(error)

    plan = make_plan(runnable)
    failed = run_study(plan, jobs=1, work=Told(runnable))
    assert [key.split("-")[0] for key in failed] == ["mild"] and "none.jsonl" in str(failed)
    scored = {row["arm"] for row in table(read_study(plan.out)) if row.get("scores")}
    assert scored == {"base", "student", "stress"}


def test_a_failure_is_reported_and_tried_again(runnable: Path) -> None:
    plan = make_plan(runnable)
    failed = run_study(plan, jobs=1, work=Here(runnable, bad="stress"))
    assert [key.split("-")[0] for key in failed] == ["stress", "student"]
    assert run_study(plan, jobs=1, work=Here(runnable)) == {}
    kept = [json.loads(line) for line in (plan.out / "study.jsonl").read_text().splitlines()]
    assert [len(row["failed"]) for row in kept] == [2, 0]


def test_two_at_a_time_are_refused(runnable: Path) -> None:
    plan = make_plan(runnable)

    class Nested(Here):
        def __call__(self, key: str) -> str | None:
            with pytest.raises(RunError, match="another process runs this study"):
                run_study(plan, jobs=1, work=Here(runnable))
            return "enough"

    assert run_study(plan, jobs=1, work=Nested(runnable))


@pytest.mark.slow
def test_after_a_kill_the_same_command_goes_on(runnable: Path, tmp_path: Path) -> None:
    """SIGKILL while a run is at work; the end is byte for byte that of a study that was left alone."""
    longer = "budget.max_steps=12"
    command = [sys.executable, "-m", "statewise", "study", "run", str(runnable), longer, "--jobs", "1"]
    plan = make_plan(runnable, None, [longer])
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        first = plan.path(plan.by_arm["stress", 0].key)
        until = time.monotonic() + 120
        while not list(first.glob("checkpoints/step_*")) and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    assert json.loads((first / "run.json").read_text())["status"] != "completed"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    alone = make_plan(runnable, tmp_path / "alone", [longer])
    run_study(alone, jobs=1)
    for job in plan.jobs:
        one, two = plan.path(job.key), alone.path(job.key)
        assert weights(one) == weights(two)


def weights(run: Path) -> bytes:
    return sorted(run.glob("checkpoints/*/model.safetensors"))[-1].read_bytes()
