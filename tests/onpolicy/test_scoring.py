"""Scoring data sets: every form of data, bad rows, resume after SIGKILL, several processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.onpolicy.conftest import Rows, column, write
from tests.training.conftest import model_dir  # noqa: F401 - a fixture

import statewise
from statewise.errors import DataError, RunError
from statewise.models.load import load_policy
from statewise.onpolicy.meter import Meter
from statewise.onpolicy.scoring import Scores, score

Make = Callable[..., Scores]


def test_statistics_of_every_token(scored: Make, model_dir: Path) -> None:  # noqa: F811
    """Against the model's own logits, one sample at a time."""
    scores = scored(temperature=1.5)
    model = load_policy(str(model_dir)).model
    total = 0
    for batch in scores.batches("tokens", "positions", "phi", "logprobs", "entropy", "varentropy", "rank", "mean_phi"):
        for row in range(len(batch["phi"])):
            ids, at = torch.tensor(batch["tokens"][row]).long(), torch.tensor(batch["positions"][row]).long()
            logits = model(input_ids=ids[None]).logits[0].double()[at - 1] / 1.5
            log_p = logits.log_softmax(-1)
            p, own = log_p.exp(), log_p.gather(-1, ids[at][:, None])[:, 0]
            entropy = -(p * log_p).sum(-1)
            assert batch["logprobs"][row] == pytest.approx(own.tolist(), abs=1e-5)
            assert batch["entropy"][row] == pytest.approx(entropy.tolist(), abs=1e-5)
            assert batch["phi"][row] == pytest.approx((own + entropy).tolist(), abs=1e-5)
            varentropy = (p * (log_p + entropy[:, None]) ** 2).sum(-1)
            assert batch["varentropy"][row] == pytest.approx(varentropy.tolist(), abs=1e-5)
            assert batch["rank"][row].tolist() == (log_p > own[:, None]).sum(-1).tolist()
            assert batch["mean_phi"][row] == pytest.approx((own + entropy).mean().item(), abs=1e-5)
            total += len(at)
    assert scores.summary["tokens"] == total and scores.summary["samples"] == 40
    ends = [t[at[-1]] for b in scores.batches("tokens", "positions") for t, at in zip(*b.values(), strict=True)]
    assert set(ends) == {load_policy(str(model_dir)).tokenizer.eos_token_id}  # the end token is scored


def test_summary_is_that_of_the_tokens(scored: Make) -> None:
    scores = scored(temperature=0.02)  # so that the random model is sure of something
    summary, phi = scores.summary, np.concatenate(column(scores, "phi")).astype(np.float64)
    assert summary["mean_phi"] == pytest.approx(phi.mean()) and summary["std_phi"] == pytest.approx(phi.std())
    assert summary["share_above_minus_1"] == pytest.approx((phi > -1).mean())
    means = column(scores, "mean_phi")
    assert summary["sample_mean_phi"]["0.5"] == pytest.approx(
        np.quantile(means, 0.5, method="inverted_cdf"), abs=1.1e-3
    )
    varentropy = np.concatenate(column(scores, "varentropy")).sum()
    assert summary["own_samples"]["z"] == pytest.approx(phi.sum() / np.sqrt(varentropy), rel=1e-5)
    assert sum(summary["histogram_phi"]["count"]) == len(phi)
    first = [p[0] for p in column(scores, "phi")]
    assert summary["by_position"][0] == pytest.approx(
        {"position": 0, "tokens": 40, "mean": np.mean(first), "se": np.std(first, ddof=1) / np.sqrt(40)}, rel=1e-4
    )
    assert "off-policy" in summary["verdict"] or "Nothing speaks" in summary["verdict"]


def test_forms_of_data(scored: Make, rows: Rows, tmp_path: Path) -> None:
    """JSON lines, Parquet, a directory of shards, a saved data set: the same scores in the same order."""
    from datasets import Dataset

    expected = column(scored(), "mean_phi")
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    (tmp_path / "shards").mkdir()
    write(tmp_path / "shards" / "a.jsonl", rows[:13])
    Dataset.from_list(rows[13:]).to_parquet(tmp_path / "shards" / "b.parquet")
    for data in ("rows.parquet", "saved", "shards"):
        scores = scored(tmp_path / data, name=f"of_{data}")
        assert column(scores, "mean_phi") == expected, data
        assert column(scores, "id") == [row["id"] for row in rows]
    assert column(scores, "place")[12:14] == [f"{tmp_path}/shards/a.jsonl:13", f"{tmp_path}/shards/b.parquet:1"]


def test_trl_formats(scored: Make) -> None:
    talk = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    longer = [*talk, {"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
    scores = scored(
        [
            {"messages": longer},
            {"prompt": talk[:1], "completion": talk[1:]},
            {"text": "one two"},
            {"input_ids": [5, 6, 7]},
        ]
    )
    counts = column(scores, "num_tokens")
    assert counts[0] == 2 * counts[1] == 4 and counts[3] == 2
    positions = column(scores, "positions")[0]
    assert positions[2] - positions[1] > 1  # two turns


def test_bad_rows(scored: Make, rows: Rows, tmp_path: Path) -> None:
    data = write(tmp_path / "mixed.jsonl", rows[:3])
    with data.open("a") as file:
        file.write('{"prompt": "no answer"}\n{not json\n' + json.dumps(rows[4]) + "\n")
    with pytest.raises(
        DataError,
        match=r"mixed.jsonl:4: completion: is missing: it has .*; columns.completion=NAME .* Mend the row, or set on_bad_row",
    ):
        scored(data, name="strict")
    assert not list((tmp_path / "strict" / "parts").glob("*.parquet"))  # refused before anything was scored
    scores = scored({"data": str(data), "on_bad_row": "skip"})
    assert column(scores, "index") == [0, 1, 2, 5]
    assert scores.summary["bad_rows"] == {
        "completion: is missing": {"rows": 1, "first": [f"{data}:4"]},
        "is not JSON": {"rows": 1, "first": [f"{data}:5"]},
    }
    lines = [json.loads(line) for line in (scores.path / "bad_rows.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == [3, 4]
    with pytest.raises(DataError, match=r"mixed.jsonl:1: has too many tokens: .* Mend the row, or set max_length"):
        scored({"data": str(data), "max_length": 9}, name="long")
    with pytest.raises(DataError, match="no row can be scored"):
        scored({"data": str(data), "on_bad_row": "skip", "max_length": 9, "too_long": "drop"}, name="none")


def test_truncated_samples(scored: Make, rows: Rows) -> None:
    full = scored(rows[:5], name="full")
    long = max(map(len, column(full, "tokens")))
    cut = scored({"data": str(full.path) + ".jsonl", "max_length": int(long) - 2, "too_long": "truncate"}, name="cut")
    for a, b, c, d in zip(*(column(s, n) for n in ("tokens", "phi") for s in (full, cut)), strict=True):
        assert b.tolist() == a.tolist()[: long - 2]
        assert d == pytest.approx(c[: len(d)], abs=1e-5)


SCRIPT = """
import sys
from statewise.onpolicy.scoring import score
from statewise.onpolicy.settings import Engine
if __name__ == "__main__":
    data, model, out = sys.argv[1:]
    score({"data": data}, model, out=out, chunk_rows=2, engine=Engine(processes=2, threads=1))
"""


def test_killed_and_resumed(scored: Make, rows: Rows, tmp_path: Path, model_dir: Path) -> None:  # noqa: F811
    """Two processes, SIGKILL half way, the rest by one process: the bytes of an undisturbed run by one process."""
    data = write(tmp_path / "rows.jsonl", [{**row, "id": f"{row['id']}-{i}"} for i in range(3) for row in rows])
    whole = score({"data": str(data)}, str(model_dir), out=tmp_path / "whole", chunk_rows=2)
    (tmp_path / "script.py").write_text(SCRIPT)
    out = tmp_path / "killed"
    command = [sys.executable, str(tmp_path / "script.py"), str(data), str(model_dir), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(Path(statewise.__file__).parents[1])}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    workers = wait_for(lambda: children(process.pid) if list((out / "parts").glob("*.parquet")) else None)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    parts = {p.name: p.stat().st_mtime_ns for p in (out / "parts").glob("*.parquet")}
    assert 0 < len(parts) < 60 and not (out / "scores.parquet").exists()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))  # they end with their parent
    resumed = score({"data": str(data)}, str(model_dir), out=out, chunk_rows=2)
    for name in ("scores.parquet", "summary.json", "report.html"):
        assert (out / name).read_bytes() == (whole.path / name).read_bytes(), name
    assert not (out / "parts").exists() and resumed.summary["samples"] == 120


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.002)
    raise AssertionError("waited too long")


def test_stored_chunks_are_not_scored_again(scored: Make, monkeypatch: pytest.MonkeyPatch, rows: Rows) -> None:
    from statewise.onpolicy import records
    from statewise.onpolicy.chunks import ChunkScorer

    whole, original, calls = scored(name="whole"), ChunkScorer.score, []

    def failing(self: Any, chunk: Any, *rest: Any) -> Any:
        calls.append(chunk[0][0])
        if len(calls) == 3:
            raise RuntimeError("power cut")
        return original(self, chunk, *rest)

    monkeypatch.setattr(ChunkScorer, "score", failing)
    with pytest.raises(RuntimeError):
        scored(whole.path.with_suffix(".jsonl"))
    assert scored(whole.path.with_suffix(".jsonl")).file.read_bytes() == whole.file.read_bytes()
    assert calls == [0, 8, 16, 16, 24, 32]
    assert records.schema().names == ["index", *column_names()][: len(records.schema().names)]


def column_names() -> list[str]:
    from statewise.onpolicy.records import LISTS, NAMES

    return [*NAMES[1:], "tokens", "positions", *LISTS]


def test_a_scoring_that_never_began_gives_way_to_the_mended_command(scored: Make, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no\.jsonl: no row can be scored"):
        scored(write(tmp_path / "no.jsonl", []))
    assert scored().summary["samples"] == 40  # other data, the same directory
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match="can't be made a directory of scores"):
        scored(name="file")


def test_another_scoring_is_not_touched(scored: Make, tmp_path: Path) -> None:
    data = scored().path.with_suffix(".jsonl")
    before = (tmp_path / "scores" / "scores.parquet").read_bytes()
    with pytest.raises(
        RunError, match=r"holds another scoring; it differs in settings.temperature \(1.0 before, 0.5 now\)"
    ):
        scored(data, temperature=0.5)
    with data.open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(RunError, match="it differs in data_files"):
        scored(data)
    assert (tmp_path / "scores" / "scores.parquet").read_bytes() == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(RunError, match="is not empty and holds no scoring"):
        scored(data, name="other")
    with pytest.raises(RunError, match="holds no finished scores"):
        Scores(tmp_path / "other")


def test_the_page_escapes_what_the_data_say(scored: Make) -> None:
    page = (scored().path / "report.html").read_text()
    body = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert "alert(" not in re.findall(r"<script[^>]*>", page).__repr__()
    assert "<script>alert" not in page.replace("\\u003c", "") and "&lt;" in body
    for title in ("Numbers", "Distribution", "Paths", "Lowest", "Typical"):
        assert f">{title}<" in body


def test_memory_does_not_grow_with_the_file(
    scored: Make, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most the chunks in work are held: rows are read as they are scored."""
    from statewise.onpolicy.chunks import ChunkScorer
    from statewise.sources import data as reading

    passes = read = scored_rows = most = 0
    original_stream, original_score = reading.stream_rows, ChunkScorer.score

    def stream(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes, read, most
        passes, read = passes + 1, 0
        for item in original_stream(*args, **kwargs):
            read += 1
            most = max(most, read - scored_rows) if passes == 2 else 0
            yield item

    def counting(self: Any, chunk: Any, *rest: Any) -> Any:
        nonlocal scored_rows
        made = original_score(self, chunk, *rest)
        scored_rows += len(chunk)
        return made

    monkeypatch.setattr(reading, "stream_rows", stream)
    monkeypatch.setattr(ChunkScorer, "score", counting)
    data = write(tmp_path / "many.jsonl", [{**row, "id": f"{i}-{row['id']}"} for i in range(5) for row in rows])
    assert scored(data).summary["samples"] == 200
    assert passes == 2 and most == 8  # the first looks through the rows


def test_a_meter_counts_each_pass_for_itself() -> None:
    meter = Meter()
    meter.start(200)
    meter.rows(200)
    meter.start(8)
    meter.rows(8)
    assert meter.line().startswith("8 of 8 rows")


@pytest.mark.parametrize("chat", ["auto", False, True])
def test_plain_text_under_a_chat_template_is_told(
    chat: str | bool,
    rows: Rows,
    tmp_path: Path,
    model_dir: Path,  # noqa: F811
) -> None:
    said: list[str] = []

    class Listening(Meter):
        def say(self, text: str) -> None:
            said.append(text)

    data = {"data": str(write(tmp_path / "text.jsonl", rows[:2])), "chat": chat}
    score(data, str(model_dir), out=tmp_path / "scores", meter=Listening())
    assert any("without the chat template" in line and "set chat = true" in line for line in said) == (chat == "auto")
