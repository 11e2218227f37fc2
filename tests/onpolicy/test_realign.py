"""`statewise realign`: what is written, that a kill or shards change no byte, and that training takes it as it is."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from statewise.component import parse
from statewise.errors import RunError
from statewise.onpolicy.realign import Realignment, RealignSettings
from statewise.onpolicy.realign_page import write_report
from statewise.onpolicy.realign_summary import Phi, Summary
from statewise.onpolicy.realigned import Realigned
from statewise.sources.realigning import KINDS
from statewise.types import World

SOURCE = {"data": "tiny:math_restyled", "count": 18, "hint": "echo", "verifier": "answer", "max_tokens": 64}
RESULTS = ("data.jsonl", "tokens.parquet", "summary.json", "report.html")


def settings(**changes) -> RealignSettings:
    return RealignSettings(source={**SOURCE, **changes}, model={"path": "tiny"}, seed=2, part_rows=6)


def contents(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in RESULTS}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    assert Realignment(settings(), out).run() is not None
    return out


def rows_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "data.jsonl").read_text().splitlines()]


def test_what_is_written(whole):
    summary, rows = json.loads((whole / "summary.json").read_text()), rows_of(whole)
    every = parquet.read_table(whole / "tokens.parquet").to_pylist()
    assert [row["index"] for row in every] == list(range(18))
    assert (summary["rows"], summary["kept"]) == (18, len(rows))
    assert (summary["hint"], summary["delimiter"]) == ("echo", "####")
    assert sum(summary["yields"].values()) == 18
    assert {row["id"] for row in rows} == {r["id"] for r in every if r["kind"] in ("own", "realigned")}
    for row in every:
        assert len(row["original_ids"]) == len(row["original_phi"]) > 0
        assert len(row["text_ids"]) == len(row["text_phi"]) == len(row["text_weights"]) > 0
    assert summary["phi"]["original"]["mean"] < -3 < 0 < summary["phi"]["kept"]["mean"]
    tokens = [value for row in every if row["kind"] in ("own", "realigned") for value in row["text_phi"]]
    assert summary["phi"]["kept"]["mean"] == pytest.approx(sum(tokens) / len(tokens), abs=1e-6)
    assert sum(bool(row["alone_ids"]) for row in every) <= 2 * 3


def test_training_takes_the_tokens_as_they_are(whole):
    from statewise.models.load import load_policy

    source = parse("source", {"kind": "dataset", "data": str(whole / "data.jsonl"), "shuffle": False}, "source")
    world = World(load_policy("tiny").tokenizer, 0)
    rollouts = source.sample(0, len(rows_of(whole)), world)
    for row, rollout in zip(rows_of(whole), rollouts, strict=True):
        prompt, text = rollout.segments
        assert [*prompt.tokens, *text.tokens] == row["input_ids"]
        assert (len(text.tokens), text.train) == (sum(row["completion_mask"]), True)
        said = world.tokenizer.decode(text.tokens, skip_special_tokens=True)
        assert row["completion"] == [{"role": "assistant", "content": said}]


def test_shards_give_the_same_bytes(whole, tmp_path):
    out = tmp_path / "out"
    assert Realignment(settings(), out, (2, 2)).run() is None
    assert not (out / "data.jsonl").exists()
    assert Realignment(settings(), out, (1, 2)).run() is not None
    assert contents(out) == contents(whole)


def test_a_killed_run_goes_on_to_the_same_bytes(whole, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "statewise", "realign", "tiny:math_restyled", "count=18", "--hint", "echo"]
    command += ["--max-tokens", "64", "--part-rows", "6", "--seed", "2", "--model", "tiny", "--out", str(out), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    deadline = time.monotonic() + 120
    while not list(out.glob("parts/*.parquet")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    first = {path: path.stat().st_mtime_ns for path in out.glob("parts/*.parquet")}
    assert 1 <= len(first) < 3
    for file in ("realign.json", "parts/00002.parquet", "data.jsonl", "tokens.parquet", "report.html"):
        (out / file).with_name(f".{Path(file).name}.0123456789ab.tmp").write_bytes(
            b"as a kill in its writing leaves it"
        )
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {path: path.stat().st_mtime_ns for path in first} == first, "what was there is not done again"
    assert contents(out) == contents(whole) and not list(out.rglob("*.tmp"))
    assert json.loads(done.stdout)["rows"] == 18
    assert "18 of 18 rows" in done.stderr


def test_a_directory_holds_one_realignment(whole, tmp_path):
    with pytest.raises(RunError, match=r"of other settings: source.beta \(3.0 before, 1.0 now\)"):
        Realignment(settings(beta=1.0), whole).run()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="is no realignment"):
        Realignment(settings(), tmp_path).run()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_data_files_are_told_apart_by_their_content(tmp_path):
    data = tmp_path / "data.jsonl"
    line = {
        "prompt": [{"role": "user", "content": "Tom has 2 cups. Tom buys 3 more. How many cups does Tom have now?"}]
    }
    data.write_text(json.dumps(line | {"completion": "two and three is five\n#### 5"}) + "\n")
    before = data.read_bytes()
    own = settings(data=str(data), count=None)
    assert Realignment(own, tmp_path / "out").run()["rows"] == 1
    assert data.read_bytes() == before
    data.write_text(data.read_text().replace("cups", "pens"))
    with pytest.raises(RunError, match="data_files"):
        Realignment(own, tmp_path / "out").run()


@pytest.fixture
def said(capsys):
    from statewise.cli import main

    def call(*words):
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        return int(stop.value.code or 0), capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shard", "0/2"], "expected I/N with I from 1 to N"),
        (["hnt=echo"], "did you mean 'hint'"),
        (["--verifier", "answr"], "did you mean 'answer'"),
        (["--verifier", "regex", "verifier.pattern=("], "is no regular expression"),
        (["--dtype", "float8"], "model.dtype"),
        (["shuffle=true"], "unknown key 'shuffle'"),
    ],
)
def test_words_that_are_wrong(said, tmp_path, words, message):
    code, printed = said("realign", "tiny:math", *words, "--model", "tiny", "--out", tmp_path / "out")
    assert code == 2
    assert message in printed.err


def test_the_command_tells_what_it_did(said, whole, monkeypatch):
    words = ["count=18", "--hint", "echo", "--max-tokens", "64", "--part-rows", "6", "--seed", "2", "--model", "tiny"]
    code, printed = said("realign", "tiny:math_restyled", *words, "--out", whole, "--quiet")
    assert code == 0
    assert printed.err == "" or "Loading" in printed.err
    assert "of 18 rows kept (own" in printed.out
    assert "before" in printed.out


def row(kind="realigned", **changes) -> Realigned:
    plain = dict(
        index=0, id="<b>0</b>", kind=kind, prompt="<script>alert(1)</script>", answer="5", reward=1.0, stop_reason="stop",
        delimiter_at=1, prompt_ids=[1], original_ids=[5, 6], original_phi=[-2.0, -4.0], text_ids=[7, 8], text_phi=[0.5, -0.5],
        text_weights=[0.25, 1.0], alone_ids=[9], alone_phi=[0.0],
    )  # fmt: skip
    return Realigned(**{**plain, **changes})


class Words:
    def decode(self, ids, skip_special_tokens=False):
        return "".join(f"<i>{i}</i>" for i in ids)


def test_the_page_escapes_what_data_and_model_said(tmp_path):
    summary = Summary()
    for one in (row(), row("own"), row("failed")):
        summary.see(one)
    told = {"data": "<img src=x>", "model": "<b>m</b>", "hint": "h", "delimiter": "<u>mark</u>", **summary.to_plain()}
    write_report(tmp_path / "page.html", told, summary, Words())
    page = (tmp_path / "page.html").read_text()
    for raw in ("<script>alert", "<img src=x>", "<b>m</b>", "<b>0</b>", "<i>7", "<u>mark"):
        assert raw not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_sums():
    phi = Phi()
    phi.see([0.5, -1.5])
    phi.see([])
    phi.see([-4.0])
    plain = phi.to_plain()
    assert plain == {
        "texts": 2,
        "tokens": 3,
        "mean": pytest.approx(-5 / 3),
        "std": pytest.approx(((0.25 + 2.25 + 16) / 3 - 25 / 9) ** 0.5),
        "share_below_minus_1": pytest.approx(2 / 3),
        "share_below_minus_3": pytest.approx(1 / 3),
        "share_below_minus_5": 0,
    }
    assert phi.means == [-0.5, -4.0]
    assert Phi().to_plain() is None
    summary = Summary()
    summary.see(row())
    assert summary.to_plain()["mean_weight"] == 0.25, "tokens behind the delimiter don't count"
    assert list(summary.to_plain()["yields"]) == list(KINDS)
