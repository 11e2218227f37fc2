"""`statewise score`, `detect` and `filter` from the command line, one after the other on the same data."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.training.conftest import model_dir  # noqa: F401 - a fixture

from statewise.tiny import tasks


@pytest.fixture
def data(tmp_path: Path) -> Path:
    made = tasks.math_problems("train", 12)
    rows = [{"question": r["prompt"][0]["content"], "answer": r["completion"][0]["content"]} for r in made]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"question": "no answer"}\n')
    return file


def test_the_three_commands(cli: Callable[..., Any], data: Path, model_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    words = [data, "columns.prompt=question", "columns.completion=answer", "chat=true", "--model", model_dir]
    strict = cli("score", *words, "--out", tmp_path / "strict")
    assert strict.code == 2 and "rows.jsonl:13: answer: is missing" in strict.err
    done = cli("score", *words, "on_bad_row=skip", "--out", tmp_path / "scores", "--json")
    summary = json.loads(done.out)
    assert done.code == 0 and summary["samples"] == 12 and summary["bad_rows"]
    assert done.err.startswith("scoring ") and "of 13 rows" in done.err and "tokens/s" in done.err
    again = cli("score", *words, "on_bad_row=skip", "--out", tmp_path / "scores", "--quiet")
    assert again.code == 0 and again.err == "" and f"{tmp_path}/scores/report.html" in again.out
    assert "share_rank_0" not in again.out and "tokens that are the model's first choice, share" in again.out
    assert "left out: 1 rows: answer: is missing" in again.out

    kept = cli("filter", tmp_path / "scores", "--out", tmp_path / "kept.jsonl", "--quantiles", "0.5", "1", "--json")
    assert kept.code == 0 and json.loads(kept.out)["after"]["rows"] == 6
    assert len((tmp_path / "kept.jsonl").read_text().splitlines()) == 6
    assert cli("filter", tmp_path / "scores", "--out", tmp_path / "kept.jsonl", "--max-rows", "1").code == 2
    nothing = cli("filter", tmp_path / "scores", "--out", tmp_path / "other.jsonl")
    assert nothing.code == 2 and "nothing is chosen" in nothing.err

    both = cli("detect", tmp_path / "scores", tmp_path / "kept.jsonl", *words[1:], "--out", tmp_path / "out", "--quiet")
    assert both.code == 0 and "A: " in both.out and "log_likelihood" in both.out, both.err
    found = json.loads((tmp_path / "out" / "detect.json").read_text())
    assert found["a"]["samples"] == 12 and found["b"]["samples"] == 6
    assert (tmp_path / "out" / "report.html").stat().st_size > 100_000


def test_relative_paths_from_score_to_filter(
    cli: Callable[..., Any], data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["columns.prompt=question", "columns.completion=answer", "chat=true", "on_bad_row=skip"]
    assert cli("score", data.name, *words, "--model", "tiny", "--out", "scores", "--quiet").code == 0
    assert cli("filter", "scores", "--out", "kept.jsonl", "--max-rows", "3").code == 0
    assert len(Path("kept.jsonl").read_text().splitlines()) == 3
    monkeypatch.chdir(tmp_path.parent)  # from elsewhere, too
    assert cli("filter", tmp_path / "scores", "--out", tmp_path / "again.jsonl", "--max-rows", "3").code == 0
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "kept.jsonl").read_bytes()


def test_a_directory_of_its_own_and_a_limit(
    cli: Callable[..., Any], data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [data.name, "columns.prompt=question", "columns.completion=answer", "chat=true", "--model", "tiny"]
    done = cli("score", *words, "--limit", "4", "--json")
    assert done.code == 0 and json.loads(done.out)["samples"] == 4
    (first,) = (tmp_path / "scores").iterdir()
    assert first.name.startswith("rows-tiny-") and cli("score", *words, "limit=4", "--quiet").code == 0
    assert list((tmp_path / "scores").iterdir()) == [first]  # the same command, the same directory
    (tmp_path / "few.jsonl").write_text("".join(data.read_text().splitlines(keepends=True)[:3]))
    both = cli("detect", first, "few.jsonl", *words[1:])
    assert both.code == 0 and len(list((tmp_path / "scores").iterdir())) == 2
    assert "of 3 rows" in both.err and "-" not in both.err.rpartition(" left")[0].rpartition(",")[2]


def test_counts_begin_anew_with_every_data_set(cli: Callable[..., Any], data: Path, tmp_path: Path) -> None:
    from statewise.onpolicy.meter import Meter
    from statewise.onpolicy.scoring import score

    meter = Meter()
    for name in ("a", "b"):
        fields = {"columns": {"prompt": "question", "completion": "answer"}, "chat": True, "limit": 5}
        score({"data": str(data), **fields}, "tiny", out=tmp_path / name, meter=meter)
        assert (meter.done_rows, meter.total_rows) == (5, 5)


def test_bad_input(cli: Callable[..., Any], data: Path, tmp_path: Path) -> None:
    out = ["--model", "tiny", "--out", tmp_path / "out"]
    assert "did you mean 'columns'" in cli("score", data, "colums.prompt=question", *out).err
    assert "expected one; a setting is KEY=VALUE" in cli("score", data, data, *out).err
    assert "expected two" in cli("detect", data, *out).err
    assert "no file or directory 'nothing.jsonl'" in cli("score", "nothing.jsonl", *out).err
    assert "processes" in cli("score", data, *out, "--processes", "0").err
    assert "engine.on" in cli("score", data, *out, "--on", "mars").err
    assert "holds no finished scores" in cli("filter", tmp_path, "--out", tmp_path / "k.jsonl", "--max-rows", "1").err


def test_realign_warns_of_plain_text_under_a_chat_template(cli: Callable[..., Any], tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} + 2 = ?", "completion": f"#### {i + 2}"} for i in range(2)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [tmp_path / "text.jsonl", "--model", "tiny", "--max-tokens", "8"]
    done = cli("realign", *words, "--out", tmp_path / "plain")
    assert done.code == 0 and done.err.count("warning: prompts of") == 1
    assert "warning" not in cli("realign", *words, "chat=true", "--out", tmp_path / "chat").err
