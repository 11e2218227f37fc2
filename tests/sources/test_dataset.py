"""The dataset source: formats, provenance of errors, policies for long samples, and the order of samples."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.sources.tokenizers import make

from statewise.errors import DataError, RecipeError
from statewise.sources import DatasetSource
from statewise.sources.templates import preview
from statewise.types import World

PAIRS = [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(10)]
TOKENIZER = make()


def world(base_dir: Path, records: list | None = None, seed: int = 0) -> World:
    note = (lambda row: records.append(row)) if records is not None else (lambda row: None)
    return World(tokenizer=TOKENIZER, seed=seed, base_dir=base_dir, record=note)


def write_lines(path: Path, rows: list[Any]) -> None:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")


def write(path: Path, rows: list[dict]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    if path.suffix == ".jsonl":
        write_lines(path, rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        path.write_text("prompt,completion\n" + "".join(f"{r['prompt']},{r['completion']}\n" for r in rows))
    else:
        parquet.write_table(pa.Table.from_pylist(rows), path)


def texts(source: DatasetSource, base: Path, count: int = 3) -> list[str]:
    return [preview(TOKENIZER, r) for r in source.sample(0, count, world(base))]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_files(suffix: str, tmp_path: Path):
    write(tmp_path / f"data{suffix}", PAIRS)
    source = DatasetSource(data=f"data{suffix}", shuffle=False)
    assert source.num_examples(world(tmp_path)) == 10
    assert texts(source, tmp_path) == [f"q{i}⟦a{i}<|im_end|>⟧" for i in range(3)]


def test_directories(tmp_path: Path):
    from datasets import Dataset, DatasetDict

    (tmp_path / "parts").mkdir()
    write(tmp_path / "parts" / "train-0.jsonl", PAIRS[:4])
    write(tmp_path / "parts" / "train-1.parquet", PAIRS[4:])
    write(tmp_path / "parts" / "test-0.jsonl", PAIRS[:1])
    assert DatasetSource(data="parts").num_examples(world(tmp_path)) == 10
    assert DatasetSource(data="parts", split="test").num_examples(world(tmp_path)) == 1
    DatasetDict(train=Dataset.from_list(PAIRS)).save_to_disk(str(tmp_path / "saved"))
    assert DatasetSource(data="saved").num_examples(world(tmp_path)) == 10
    with pytest.raises(DataError, match="has no split 'dev'; it has: train"):
        DatasetSource(data="saved", split="dev").num_examples(world(tmp_path))


def test_formats_columns_chat_and_system(tmp_path: Path):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    write_lines(tmp_path / "m.jsonl", [{"messages": turns}])
    write_lines(tmp_path / "t.jsonl", [{"text": "plain"}])
    write_lines(tmp_path / "g.jsonl", [{"question": "q", "answer": "x <<1+1=2>>2\n#### 2"}])
    assert texts(DatasetSource(data="t.jsonl"), tmp_path, 1) == ["p⟦lain<|im_end|>⟧"]
    (text,) = texts(DatasetSource(data="m.jsonl", system="be kind"), tmp_path, 1)
    assert text.startswith("<|im_start|>system\nbe kind<|im_end|>") and text.endswith("⟦yo<|im_end|>⟧\n")
    gsm8k = {"prompt": "question", "completion": "answer"}
    source = DatasetSource(data="g.jsonl", columns=gsm8k, chat=True, remove=["<<[^>]*>>"])
    (text,) = texts(source, tmp_path, 1)
    assert text == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦x 2\n#### 2<|im_end|>⟧\n"


BAD = [
    ("{broken", "is not JSON"),
    ("[1]", "is no object with named fields"),
    ({"prompt": "q"}, "completion"),
    ({"prompt": "q", "completion": ""}, "completion: is empty"),
    ({"prompt": 3, "completion": "a"}, "expected text or a list of messages"),
    ({"question": "q"}, "source.columns"),
    ({"messages": []}, "messages: is empty"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "unknown role"),
    ({"messages": [{"role": "user"}]}, "content is no text"),
    ({"text": "  "}, "text: is empty"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_a_bad_row_is_named_or_skipped_and_counted(row: Any, reason: str, tmp_path: Path):
    write_lines(tmp_path / "d.jsonl", [PAIRS[0], row, PAIRS[1]])
    with pytest.raises(DataError) as caught:
        DatasetSource(data="d.jsonl").num_examples(world(tmp_path))
    assert "d.jsonl:2" in str(caught.value) and reason in str(caught.value)
    records: list[dict] = []
    source = DatasetSource(data="d.jsonl", on_bad_row="skip")
    assert source.num_examples(world(tmp_path, records)) == 2
    ((reason_counted, counted),) = records[0]["bad_rows"].items()
    assert counted["rows"] == 1 and counted["first"][0].endswith("d.jsonl:2") and reason in reason_counted


def test_files_that_are_no_data(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "latin.jsonl").write_bytes('{"text": "é"}'.encode("latin-1"))
    (tmp_path / "table.xlsx").write_bytes(b"x")
    for name, reason in (("empty", "no usable rows"), ("latin", "not UTF-8"), ("gone", "no file or directory")):
        with pytest.raises(DataError, match=reason):
            DatasetSource(data=f"{name}.jsonl").num_examples(world(tmp_path))
    with pytest.raises(DataError, match="unknown kind of file"):
        DatasetSource(data="table.xlsx").num_examples(world(tmp_path))
    (tmp_path / "short.csv").write_text("prompt,completion\nq,a\nq\n")
    with pytest.raises(DataError, match=r"short\.csv:3: .*fields"):
        DatasetSource(data="short.csv").num_examples(world(tmp_path))


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path):
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(PAIRS[0]).encode() + b"\n")
    assert DatasetSource(data="bom.jsonl").num_examples(world(tmp_path)) == 1


def test_zero_supervised_tokens_show_the_sample(tmp_path: Path):
    write_lines(tmp_path / "d.jsonl", [{"messages": [{"role": "user", "content": "only a question"}]}])
    with pytest.raises(DataError, match="no supervised token.*only a question"):
        DatasetSource(data="d.jsonl").num_examples(world(tmp_path))


@pytest.mark.parametrize(("policy", "left", "dropped", "truncated"), [("drop", 1, 2, 0), ("truncate", 2, 1, 1)])
def test_samples_that_are_too_long(policy: Any, left: int, dropped: int, truncated: int, tmp_path: Path):
    rows = [PAIRS[0], {"prompt": "q", "completion": "long " * 9}, {"prompt": "long " * 9, "completion": "a"}]
    write_lines(tmp_path / "d.jsonl", rows)
    with pytest.raises(DataError, match=r"above source\.max_length = 20"):
        DatasetSource(data="d.jsonl", max_length=20).num_examples(world(tmp_path))
    records: list[dict] = []
    source = DatasetSource(data="d.jsonl", max_length=20, too_long=policy)
    assert source.num_examples(world(tmp_path, records)) == left
    assert (records[0]["dropped_too_long"], records[0]["truncated"]) == (dropped, truncated)
    assert max(r.num_tokens for r in source.sample(0, left, world(tmp_path))) <= 20


def ids(source: DatasetSource, base: Path, step: int, count: int, seed: int = 0) -> list[str]:
    return [r.example.text for r in source.sample(step, count, world(base, seed=seed))]


def test_order_is_a_function_of_seed_and_step(tmp_path: Path):
    write_lines(tmp_path / "d.jsonl", PAIRS)
    source = DatasetSource(data="d.jsonl")
    steps = [ids(source, tmp_path, step, 4) for step in range(5)]
    flat = [name for step in steps for name in step]
    assert sorted(flat[:10]) == sorted(flat[10:]) == sorted(r["prompt"] for r in PAIRS)
    assert flat[:10] != flat[10:], "each epoch has an order of its own"
    assert ids(source, tmp_path, 3, 4) == steps[3], "no memory of what was drawn before"
    assert ids(source, tmp_path, 0, 10, seed=1) != flat[:10]
    assert [r.group for r in source.sample(2, 4, world(tmp_path))] == [0, 1, 2, 3]


def test_settings_are_checked():
    for settings, match in (
        ({"columns": {"promt": "q"}}, "did you mean 'prompt'"),
        ({"remove": ["("]}, "no regular expression"),
        ({"count": 3}, "belongs to embedded data"),
    ):
        with pytest.raises(RecipeError, match=match):
            DatasetSource(data="d.jsonl", **settings)


def test_an_unreachable_hub_name_says_so(tmp_path: Path):
    with pytest.raises(DataError, match="no local file, and the hub gave no data set"):
        DatasetSource(data="nobody/nothing").num_examples(world(tmp_path))
