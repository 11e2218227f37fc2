"""The dataset source: formats, provenance of errors, policies for long samples, counts, and the order of samples."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.sources.conftest import build_tokenizer

from statewise.component import parse
from statewise.errors import DataError, RecipeError
from statewise.sources import DatasetSource
from statewise.sources.templates import encode_prompt, preview
from statewise.types import World

PAIRS = [{"prompt": f"hello {i}", "completion": f" it is {i}"} for i in range(10)]
TALK = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "fine"}]
TOKENIZER = build_tokenizer("chatml", eos="<|im_end|>")
GSM8K = {"prompt": "question", "completion": "answer"}


def world(base_dir: Path, records: list | None = None, seed: int = 0, tokenizer: Any = TOKENIZER) -> World:
    note = (lambda row: records.append(row)) if records is not None else (lambda row: None)
    return World(tokenizer=tokenizer, seed=seed, base_dir=base_dir, record=note)


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


def write(path: Path, rows: list[dict]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        path.write_text("prompt,completion\n" + "".join(f"{r['prompt']},{r['completion']}\n" for r in rows))
    elif path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_lines(path, rows)


def texts(source: DatasetSource, base: Path, count: int = 3) -> list[str]:
    return [preview(TOKENIZER, r) for r in source.sample(0, count, world(base))]


def counted(source: DatasetSource, base: Path) -> dict[str, Any]:
    """The counts that go to the run record, which must add up."""
    records: list[dict] = []
    samples = source.num_examples(world(base, records))
    (row,) = records
    bad = sum(reason["rows"] for reason in row["bad_rows"].values())
    assert row["rows"] == row["samples"] + bad + row["dropped_too_long"] and row["samples"] == samples
    return row


@pytest.mark.parametrize("name", ["d.jsonl", "d.ndjson", "d.json", "d.csv", "d.parquet", "rows/part.jsonl"])
def test_files(name: str, tmp_path: Path):
    write(tmp_path / name, PAIRS)
    source = DatasetSource(data=name.split("/")[0], shuffle=False)
    assert source.num_examples(world(tmp_path)) == 10
    assert texts(source, tmp_path) == [f"hello {i}⟦ it is {i}<|im_end|>⟧" for i in range(3)]


def test_a_json_file_may_hold_lines_or_a_data_field(tmp_path: Path):
    write_lines(tmp_path / "lines.json", PAIRS)
    (tmp_path / "field.json").write_text(json.dumps({"version": 1, "data": PAIRS}))
    for name in ("lines.json", "field.json"):
        assert DatasetSource(data=name).num_examples(world(tmp_path)) == 10


def test_directories(tmp_path: Path):
    from datasets import Dataset, DatasetDict

    write(tmp_path / "parts" / "train-0.jsonl", PAIRS[:4])
    write(tmp_path / "parts" / "train-1.parquet", PAIRS[4:])
    write(tmp_path / "parts" / "gsm8k_test.jsonl", PAIRS[:1])
    (tmp_path / "parts" / "dataset_infos.json").write_text("{}")  # of the hub, no data
    assert DatasetSource(data="parts").num_examples(world(tmp_path)) == 10
    assert DatasetSource(data="parts", split="test").num_examples(world(tmp_path)) == 1
    for saved in (DatasetDict(train=Dataset.from_list(PAIRS)), Dataset.from_list(PAIRS)):
        path = tmp_path / type(saved).__name__
        saved.save_to_disk(str(path))
        assert DatasetSource(data=path.name).num_examples(world(tmp_path)) == 10
    with pytest.raises(DataError, match="has no split 'dev'; it has: train"):
        DatasetSource(data="DatasetDict", split="dev").num_examples(world(tmp_path))


def test_another_split_is_never_read_for_one_that_is_not_there(tmp_path: Path):
    write(tmp_path / "parts" / "test.jsonl", PAIRS)
    write(tmp_path / "parts" / "extra.jsonl", PAIRS)
    with pytest.raises(DataError, match=r"has no file of split 'train'; it has: extra\.jsonl, test\.jsonl"):
        DatasetSource(data="parts").num_examples(world(tmp_path))
    write(tmp_path / "valid" / "val.jsonl", PAIRS)
    assert DatasetSource(data="valid", split="validation").num_examples(world(tmp_path)) == 10


def test_paths_start_beside_the_recipe_then_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here, there = tmp_path / "here", tmp_path / "there"
    write(here / "d.jsonl", PAIRS[:2])
    write(there / "d.jsonl", PAIRS[:3])
    write(there / "only.jsonl", PAIRS[:4])
    monkeypatch.chdir(there)
    assert DatasetSource(data="d.jsonl").num_examples(world(here)) == 2
    assert DatasetSource(data="only.jsonl").num_examples(world(here)) == 4
    assert DatasetSource(data=str(there / "d.jsonl")).num_examples(world(here)) == 3


def test_formats(tmp_path: Path):
    write_lines(tmp_path / "m.jsonl", [{"messages": TALK}])
    write_lines(tmp_path / "p.jsonl", [{"prompt": TALK[:1], "completion": TALK[1:]}])
    write_lines(tmp_path / "t.jsonl", [{"text": "hello world"}])
    talk = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n⟦fine<|im_end|>⟧\n"
    assert texts(DatasetSource(data="m.jsonl"), tmp_path, 1) == [talk]
    assert texts(DatasetSource(data="p.jsonl"), tmp_path, 1) == [talk]
    assert texts(DatasetSource(data="t.jsonl"), tmp_path, 1) == ["hello⟦ world<|im_end|>⟧"]
    (text,) = texts(DatasetSource(data="m.jsonl", system="be fine"), tmp_path, 1)
    assert text == "<|im_start|>system\nbe fine<|im_end|>\n" + talk


def test_columns_chat_and_removed_annotations(tmp_path: Path):
    write_lines(tmp_path / "g.jsonl", [{"question": "two plus 3", "answer": "it is <<2+3=5>>5\n#### 5"}])
    source = DatasetSource(data="g.jsonl", columns=GSM8K, chat=True, remove=["<<[^>]*>>"])
    (rollout,) = source.sample(0, 1, world(tmp_path))
    text = "<|im_start|>user\ntwo plus 3<|im_end|>\n<|im_start|>assistant\n⟦it is 5\n#### 5<|im_end|>⟧\n"
    assert preview(TOKENIZER, rollout) == text
    example = rollout.example
    assert list(example.messages) == [{"role": "user", "content": "two plus 3"}]
    assert list(rollout.segments[0].tokens) == encode_prompt(TOKENIZER, example.messages)
    assert example.answer == "it is <<2+3=5>>5\n#### 5" and example.metadata["question"] == "two plus 3"
    assert texts(source.model_copy(update={"chat": "auto"}), tmp_path, 1) == ["two plus 3⟦it is 5\n#### 5<|im_end|>⟧"]


def test_a_row_that_fits_two_formats_has_the_one_that_columns_name(tmp_path: Path):
    row = {"prompt": "hello", "messages": TALK, "text": "bye now", "output": "fine"}
    write_lines(tmp_path / "d.jsonl", [row])
    assert texts(DatasetSource(data="d.jsonl"), tmp_path, 1)[0].startswith("<|im_start|>user")
    assert texts(DatasetSource(data="d.jsonl", columns={"completion": "output"}), tmp_path, 1)[0].startswith("hello⟦")
    assert texts(DatasetSource(data="d.jsonl", columns={"text": "text"}), tmp_path, 1)[0].startswith("bye⟦")


def test_the_right_choice_is_a_multiple_choices_completion(tmp_path: Path):
    write_lines(tmp_path / "d.jsonl", [{"prompt": "two is ", "choices": ["three", "2"], "answer": 1}])
    assert texts(DatasetSource(data="d.jsonl"), tmp_path, 1) == ["two is ⟦2<|im_end|>⟧"]
    write_lines(tmp_path / "d.jsonl", [{"prompt": "two is ", "choices": ["three", "2"], "answer": 2}])
    with pytest.raises(DataError, match=r"answer: is no index of choices: received 2 for 2"):
        texts(DatasetSource(data="d.jsonl"), tmp_path, 1)


@pytest.mark.parametrize("name", ["tiny:math", "tiny:facts", "tiny:beliefs", "tiny:text"])
def test_embedded_tasks(name: str, tmp_path: Path):
    source = DatasetSource(data=name, count=12)
    rollouts = source.sample(0, 12, world(tmp_path))
    assert len({r.example.id for r in rollouts}) == 12
    assert all(r.num_action_tokens > 0 for r in rollouts)
    assert {r.example.id for r in source.sample(1, 12, world(tmp_path))} == {r.example.id for r in rollouts}


def test_settings_of_the_embedded_math(tmp_path: Path):
    def first(**settings: Any) -> Any:
        return DatasetSource(data="tiny:math", count=4, shuffle=False, **settings).sample(0, 1, world(tmp_path))[0]

    assert first(steps=[3]).example.metadata["steps"] == 3
    assert preview(TOKENIZER, first(style="verbose")) != preview(TOKENIZER, first())
    assert first(seed=1).example.id != first().example.id


BAD = [
    ("{broken", "is not JSON"),
    ("[1]", "is no object with named fields"),
    ({"prompt": "hello"}, "completion: is missing"),
    ({"completion": "hello"}, "prompt: is missing"),
    ({"prompt": "hello", "completion": " "}, "completion: is empty"),
    ({"prompt": 3, "completion": "a"}, "prompt: expected text or a list of messages"),
    (
        {"question": "hello"},
        "has none of the fields messages, prompt + completion, text, input_ids; name them in source.columns",
    ),
    ({"messages": []}, "messages: is empty"),
    ({"messages": "hello"}, "messages: expected a list of messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages: unknown role, expected one of system"),
    ({"messages": [{"from": "human", "value": "x"}]}, "messages: unknown role"),
    ({"messages": [{"role": "user"}]}, "messages: content is no text"),
    ({"messages": [*TALK[:1], {"role": "assistant", "content": ""}]}, "messages: an assistant's content is empty"),
    ({"messages": TALK[:1]}, "has no supervised token"),
    ({"text": "  "}, "text: is empty"),
    ({"text": "hello", "id": [1]}, "id: expected a text or an integer"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_a_bad_row_is_named_or_skipped_and_counted(row: Any, reason: str, tmp_path: Path):
    write_lines(tmp_path / "d.jsonl", [PAIRS[0], row, PAIRS[1]])
    with pytest.raises(DataError) as caught:
        DatasetSource(data="d.jsonl").num_examples(world(tmp_path))
    assert f"{tmp_path / 'd.jsonl'}:2: {reason}" in str(caught.value)
    assert "on_bad_row = 'skip'" in str(caught.value)
    row = counted(DatasetSource(data="d.jsonl", on_bad_row="skip"), tmp_path)
    ((why, found),) = row["bad_rows"].items()
    assert reason in why and found == {"rows": 1, "first": [f"{tmp_path / 'd.jsonl'}:2"]}


def test_bad_rows_are_counted_by_reason(tmp_path: Path):
    rows = [
        PAIRS[0],
        *({"prompt": f"hello {i}"} for i in range(5)),
        *({"prompt": i, "completion": "a"} for i in range(2)),
    ]
    write_lines(tmp_path / "d.jsonl", rows)
    row = counted(DatasetSource(data="d.jsonl", on_bad_row="skip"), tmp_path)
    assert [(r["rows"], len(r["first"])) for r in row["bad_rows"].values()] == [(5, 3), (2, 2)]


def test_bad_bytes_are_named_by_line(tmp_path: Path):
    lines = [json.dumps(PAIRS[0]).encode(), '{"text": "é"}'.encode("latin-1"), json.dumps(PAIRS[1]).encode()]
    (tmp_path / "d.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match=r"d\.jsonl:2: is not UTF-8: byte 11 of the line"):
        DatasetSource(data="d.jsonl").num_examples(world(tmp_path))
    assert counted(DatasetSource(data="d.jsonl", on_bad_row="skip"), tmp_path)["samples"] == 2
    (tmp_path / "d.csv").write_bytes("prompt,completion\nhello,é\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"d\.csv:2: is not UTF-8"):
        DatasetSource(data="d.csv").num_examples(world(tmp_path))


@pytest.mark.parametrize("name", ["d.jsonl", "d.json"])
def test_half_a_character_is_a_bad_row(name: str, tmp_path: Path):
    r"""`\ud83d` is half of an emoji; whole ones pass, escaped or not."""
    halves = [
        r'{"prompt": "a", "completion": "\ud83d b"}',
        r'{"prompt": "\uD83D\uDE00 ok", "completion": "\ud83d\ude00"}',
    ]
    text = "\n".join(halves) if name == "d.jsonl" else f"[{', '.join(halves)}]"
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=r"holds half a character: \\ud83d without its other half"):
        DatasetSource(data=name).num_examples(world(tmp_path))
    assert counted(DatasetSource(data=name, on_bad_row="skip"), tmp_path)["samples"] == 1


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.jsonl", "", "holds no usable rows"),
        ("empty.csv", "", "holds no usable rows"),
        ("broken.json", "[1, ", r"broken\.json: is not JSON"),
        ("object.json", '{"a": 1}', "expected a list of objects"),
        ("broken.parquet", "x", "no readable Parquet file"),
        ("table.xlsx", "x", "unknown kind of file '.xlsx'"),
        ("short.csv", "prompt,completion\nhello,fine\nhello\n", r"short\.csv:3: has another number of fields.*1 for 2"),
        ("long.csv", 'prompt,completion\n"a\nb",fine,now\n', r"long\.csv:2: has another number of fields.*3 for 2"),
        ("twice.csv", "prompt,prompt\nhello,fine\n", r"twice\.csv:1: two columns have one name"),
    ],
)
def test_files_that_are_no_data(name: str, content: str, reason: str, tmp_path: Path):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=reason):
        DatasetSource(data=name).num_examples(world(tmp_path))


def test_names_that_are_no_data(tmp_path: Path):
    (tmp_path / "nothing").mkdir()
    for data, reason in (
        ("gone.jsonl", "no file or directory 'gone.jsonl'; looked in"),
        ("./gone", "no file or directory"),
        ("nothing", "holds no data file"),
        ("nobody/nothing", "no local file, and the hub gave no data set"),
        ("tiny:maths", "expected one of tiny:math"),
    ):
        with pytest.raises(DataError, match=reason):
            DatasetSource(data=data).num_examples(world(tmp_path))


def test_a_byte_order_mark_and_other_line_separators_are_read(tmp_path: Path):
    odd = {"prompt": "hello\u2028\x85", "completion": "world"}
    text = "\r\n".join([json.dumps(PAIRS[0]), "", json.dumps(odd, ensure_ascii=False)])
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "bom.csv").write_bytes(b"\xef\xbb\xbfprompt,completion\r\nhello,world\r\n")
    rollouts = DatasetSource(data="bom.jsonl", shuffle=False).sample(0, 2, world(tmp_path))
    assert rollouts[1].example.text == odd["prompt"] and rollouts[1].example.id == "bom.jsonl:3"
    assert DatasetSource(data="bom.csv").num_examples(world(tmp_path)) == 1


LONG = [PAIRS[0], {"prompt": "hello", "completion": " world" * 30}, {"prompt": "hello " * 30, "completion": "fine"}]


def test_samples_that_are_too_long_are_an_error(tmp_path: Path):
    write_lines(tmp_path / "d.jsonl", LONG)
    with pytest.raises(DataError) as caught:
        DatasetSource(data="d.jsonl", max_length=20).num_examples(world(tmp_path))
    assert f"{tmp_path / 'd.jsonl'}:2: sample 'd.jsonl:2' has 32 tokens, above source.max_length = 20" in str(
        caught.value
    )
    assert "2 of 3 samples are too long" in str(caught.value) and "'drop' or 'truncate'" in str(caught.value)
    assert DatasetSource(data="d.jsonl", max_length=None).num_examples(world(tmp_path)) == 3


@pytest.mark.parametrize(("policy", "samples", "dropped", "truncated"), [("drop", 1, 2, 0), ("truncate", 2, 1, 1)])
def test_long_samples_are_dropped_or_cut_and_counted(
    policy: Any, samples: int, dropped: int, truncated: int, tmp_path: Path
):
    write_lines(tmp_path / "d.jsonl", LONG)
    source = DatasetSource(data="d.jsonl", max_length=20, too_long=policy, shuffle=False)
    row = counted(source, tmp_path)
    assert (row["samples"], row["dropped_too_long"], row["truncated"]) == (samples, dropped, truncated)
    rollouts = source.sample(0, samples, world(tmp_path))
    assert row["tokens"] == sum(r.num_tokens for r in rollouts)
    assert row["supervised_tokens"] == sum(r.num_action_tokens for r in rollouts) > 0
    if truncated:
        cut = rollouts[1]
        assert cut.num_tokens == 20 and cut.num_action_tokens > 0
        assert cut.tokens()[-1] != TOKENIZER.eos_token_id  # it did not end there


def test_repeated_rows_and_ids_keep_ids_of_their_own(tmp_path: Path):
    write_lines(tmp_path / "d.jsonl", [{**PAIRS[0], "id": 7}, {**PAIRS[1], "id": 7}, PAIRS[2], PAIRS[2]])
    source = DatasetSource(data="d.jsonl", shuffle=False)
    assert counted(source, tmp_path)["repeated_ids"] == 1
    found = [r.example.id for r in source.sample(0, 4, world(tmp_path))]
    assert found == ["7", "7#2", "d.jsonl:3", "d.jsonl:4"]


def test_limit_takes_the_first_rows(tmp_path: Path):
    write_lines(tmp_path / "d.jsonl", PAIRS)
    row = counted(DatasetSource(data="d.jsonl", limit=3), tmp_path)
    assert (row["rows"], row["samples"]) == (3, 3)


def drawn(source: DatasetSource, base: Path, step: int, count: int, seed: int = 0) -> list[str | None]:
    return [r.example.text for r in source.sample(step, count, world(base, seed=seed))]


def test_order_is_a_function_of_seed_and_step(tmp_path: Path):
    write_lines(tmp_path / "d.jsonl", PAIRS)
    source = DatasetSource(data="d.jsonl")
    steps = [drawn(source, tmp_path, step, 4) for step in range(5)]
    flat = [name for step in steps for name in step]
    assert sorted(flat[:10]) == sorted(flat[10:]) == sorted(r["prompt"] for r in PAIRS)
    assert flat[:10] != flat[10:], "each epoch has an order of its own"
    assert drawn(source, tmp_path, 3, 4) == steps[3], "no memory of what was drawn before"
    assert [drawn(source, tmp_path, step, 2) for step in range(10)] == [flat[i : i + 2] for i in range(0, 20, 2)]
    assert drawn(source, tmp_path, 0, 10, seed=1) != flat[:10]
    assert [r.group for r in source.sample(2, 4, world(tmp_path))] == [0, 1, 2, 3]
    assert len(drawn(source, tmp_path, 0, 25)) == 25  # more than an epoch in a step


def test_two_tokenizers_and_a_changed_file_in_one_process(tmp_path: Path):
    write_lines(tmp_path / "d.jsonl", [PAIRS[0]])
    source, other = DatasetSource(data="d.jsonl"), build_tokenizer("gemma", adds_bos=True)
    plain = source.sample(0, 1, world(tmp_path))[0].tokens()
    assert source.sample(0, 1, world(tmp_path, tokenizer=other))[0].tokens()[0] == other.bos_token_id
    assert source.sample(0, 1, world(tmp_path))[0].tokens() == plain
    write_lines(tmp_path / "d.jsonl", [PAIRS[1]])
    assert source.sample(0, 1, world(tmp_path))[0].example.text == "hello 1"


def test_data_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = sys.modules["statewise.sources.data"]
    calls, original = [], module.read_rows  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "read_rows", lambda *a, **k: calls.append(a) or original(*a, **k))
    write_lines(tmp_path / "d.jsonl", PAIRS)
    source = DatasetSource(data="d.jsonl")
    for step in range(4):
        source.sample(step, 3, world(tmp_path))
    assert source.num_examples(world(tmp_path)) == 10 and len(calls) == 1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"columns": {"promt": "q"}}, "unknown name 'promt'; did you mean 'prompt'"),
        ({"remove": ["("]}, "no regular expression"),
        ({"count": 3}, "count: belongs to embedded data"),
        ({"data": "tiny:facts", "style": "terse"}, "style: belongs to 'tiny:math'"),
        ({"too_long": "cut"}, "too_long"),
    ],
)
def test_settings_are_checked(settings: dict, reason: str):
    with pytest.raises(RecipeError, match=reason):
        parse("source", {"kind": "dataset", "data": "d.jsonl", **settings}, "source")


def test_settings_that_do_not_fit_the_data(tmp_path: Path):
    write_lines(tmp_path / "d.jsonl", PAIRS)
    write_lines(tmp_path / "m.jsonl", [{"messages": TALK}])
    with pytest.raises(RecipeError, match=r"set source\.chat = true"):
        DatasetSource(data="d.jsonl", system="be fine").num_examples(world(tmp_path))
    with pytest.raises(DataError, match="chat = false"):
        DatasetSource(data="m.jsonl", chat=False).num_examples(world(tmp_path))
    with pytest.raises(
        DataError, match=r"q: is missing \(source\.columns names it for prompt\): it has prompt, completion"
    ):
        DatasetSource(data="d.jsonl", columns={"prompt": "q"}).num_examples(world(tmp_path))


def test_round_trip():
    source = parse(
        "source", {"kind": "dataset", "data": "d", "columns": GSM8K, "chat": True, "max_length": 64}, "source"
    )
    assert parse("source", source.to_plain(), "source") == source
    assert source.columns_written() == {"gold"}
