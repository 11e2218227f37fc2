"""The command line around the real loop: interrupted, resumed with a longer budget, shown."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from statewise.cli import main
from statewise.overrides import to_toml
from statewise.run import RunDir


def wait_for_steps(run: Path, process: subprocess.Popen[str]) -> None:
    end = time.time() + 120
    while time.time() < end and process.poll() is None:
        file = run / "metrics.jsonl"
        if file.is_file() and file.stat().st_size:
            return
        time.sleep(0.05)
    raise AssertionError(f"no step was logged; exit code {process.poll()}")


def test_interrupt_and_resume(plain: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "small.toml", tmp_path / "run"
    file.write_text(to_toml({**plain, "budget": {"max_steps": 100_000}}))
    command = [sys.executable, "-m", "statewise", "train", str(file), "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stderr is not None
    assert process.stderr.readline().startswith("statewise ")  # before anything heavy is loaded
    wait_for_steps(out, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3 and f"statewise train --resume {out}" in err and "Traceback" not in err
    run = RunDir.open(out)
    step = max(run.checkpoints())
    assert run.status == "interrupted" and step == run.metrics()[-1]["step"]

    with pytest.raises(SystemExit) as ended:
        main(["train", "--resume", str(out), f"budget.max_steps={step + 2}", "--json"])
    assert not ended.value.code
    printed = json.loads(capsys.readouterr().out)
    assert printed["status"] == "completed" and printed["step"] == step + 2
    assert [row["step"] for row in run.metrics() if "loss" in row] == list(range(1, step + 3))

    with pytest.raises(SystemExit):
        main(["runs", "show", str(out)])
    assert f"completed at step {step + 2}" in capsys.readouterr().out


def test_dry_run_of_the_real_plan(plain: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.toml"
    file.write_text(to_toml(plain))
    with pytest.raises(SystemExit) as ended:
        main(["train", str(file), "--dry-run", "--out", str(tmp_path / "run")])
    assert not ended.value.code and not (tmp_path / "run").exists()
    shown = capsys.readouterr().out
    for part in ("loss 1:", "tokens:    6 steps", "memory:    about", "max_steps = 6"):
        assert part in shown


def test_dry_run_says_that_completions_are_sampled(
    plain: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [
        {"name": "math", "source": {"kind": "policy", "data": "tiny:math", "count": 8, "max_tokens": 24}},
        {"source": {"kind": "policy", "data": "tiny:facts", "max_tokens": 12}},
    ]
    reward = {"signal": [{"kind": "reward", "verifier": "answer"}], "objective": ["clip"]}
    changed = {**plain, "source": {"kind": "mixture", "parts": parts}, **reward}
    file = tmp_path / "sampled.toml"
    file.write_text(to_toml(changed))
    with pytest.raises(SystemExit):
        main(["train", str(file), "--dry-run"])
    assert "completions of at most 24 tokens, sampled while it trains" in capsys.readouterr().out
