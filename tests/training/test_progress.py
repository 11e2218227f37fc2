"""Displays and trackers."""

import math
import sys
from pathlib import Path

import pytest

from statewise.errors import MissingExtra, RecipeError
from statewise.training import progress, trackers
from statewise.training.progress import Live, Plain, Quiet, Rate, clock, open_progress


def test_rate_and_time_left() -> None:
    rate = Rate()
    rate.see(0.5, {"total_tokens": 1000, "step_seconds": 2.0}, now=100.0)  # a resumed run starts in the middle
    assert rate.tokens_per_second is None and rate.seconds_left is None
    rate.see(0.6, {"total_tokens": 1400, "step_seconds": 2.0}, now=102.0)
    assert rate.tokens_per_second == 200.0
    assert rate.seconds_left == pytest.approx((102.0 - 98.0) / 0.1 * 0.4, rel=1e-6)


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Plain(every=1000) as display:
        for step in range(1, 11):
            row = {"step": step, "loss": 1 / step, "total_tokens": 100 * step, "step_seconds": 0.5}
            display.update(step / 10, row)
        display.say("done")
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 3  # the first at once, the last always
    first, last = (dict(part.split("=") for part in line.split()) for line in lines[:2])
    assert first == {"step": "1", "progress": "0.100", "loss": "1"}
    assert last["step"] == "10" and last["tokens_per_second"] == "200" and last["seconds_left"] == "0"


def test_what_the_policy_wrote_is_in_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"step": 1, "loss": 0.5, "reward": 0.123456, "completion_tokens": 31.25, "truncated_share": 0.0}
    Plain().update(0.5, row)
    Plain().update(0.5, {"step": 2, "tokens": 0, "accepted_share": 0.0, "truncated_share": 1.0})
    assert capsys.readouterr().err.splitlines() == [
        "step=1 progress=0.500 loss=0.5 reward=0.123 completion_tokens=31.2 truncated_share=0",
        "step=2 progress=0.500 accepted_share=0 truncated_share=1",
    ]
    with Live("x") as display:
        display.update(0.5, {**row, "accepted_share": 0.25})
    assert "step 1  loss 0.5  reward 0.123  accepted 0.25  length 31.2  cut 0" in capsys.readouterr().err


def test_the_display_fits_the_place(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(open_progress("x", quiet=True), Quiet)
    assert isinstance(open_progress("x"), Plain)
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    with open_progress("x") as display:
        assert isinstance(display, Live)
        display.update(0.5, {"step": 3, "loss": 0.25})
        display.say("[not markup] text")
    err = capsys.readouterr().err
    assert "[not markup] text" in err and "step 3" in err and "loss 0.25" in err
    with Quiet() as quiet:
        quiet.say("nothing")
        quiet.update(1.0, {})
    assert capsys.readouterr() == ("", "")


def test_clock() -> None:
    assert [clock(s) for s in (5.4, 65, 3661)] == ["0:05", "1:05", "1:01:01"]


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    opened = trackers.open_trackers(["tensorboard"], tmp_path, {"optim": {"lr": 0.1}, "signal": [{"kind": "gold"}]})
    for step in (1, 2):
        opened.log({"step": step, "loss": 1.0 / step, "broken": math.nan, "text": "x"}, step)
    opened.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 0.5)]
    assert "broken" not in events.Tags()["scalars"]


def test_no_tracker_and_wrong_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = trackers.open_trackers([], tmp_path, {})
    nothing.log({"loss": 1.0}, 1)
    nothing.close()
    with pytest.raises(RecipeError, match="did you mean 'wandb'"):
        trackers.open_trackers(["wanb"], tmp_path, {})
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'statewise\[wandb\]'"):
        trackers.open_trackers(["wandb"], tmp_path, {})


def test_flat() -> None:
    assert trackers.flat({"a": {"b": 1, "c": [True, None]}, "d": "x"}) == {
        "a.b": 1,
        "a.c.0": True,
        "a.c.1": "None",
        "d": "x",
    }
