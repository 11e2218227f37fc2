"""Rows with token ids: taken as they are where they are the text's, under this tokenizer."""

from typing import Any

import pytest

from statewise.models.load import load_tokenizer
from statewise.settings import ModelSettings
from statewise.sources.dataset import DatasetSource
from statewise.sources.reading import RowError
from statewise.sources.rows import encode_row


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(ModelSettings())


def encoded(tokenizer: Any, row: dict[str, Any], **settings: Any) -> list[tuple[tuple[int, ...], bool]]:
    _, segments = encode_row(DatasetSource(data="rows.jsonl", **settings), tokenizer, row, "rows.jsonl:1")
    return [(s.tokens, s.train) for s in segments]


def split_apart(tokenizer: Any, text: str) -> list[int]:
    """Ids of the text that encoding it would not give: a token a character."""
    return [i for c in text for i in tokenizer(c, add_special_tokens=False)["input_ids"]]


def test_ids_are_kept(tokenizer: Any) -> None:
    ids = split_apart(tokenizer, "the answer")
    row = {
        "prompt": "Say",
        "completion": "the answer",
        "input_ids": [5, 6, *ids],
        "completion_mask": [0, 0] + [1] * len(ids),
    }
    assert encoded(tokenizer, row) == [((5, 6), False), (tuple(ids), True)]
    assert ids != tokenizer("the answer", add_special_tokens=False)["input_ids"]
    assert encoded(tokenizer, {"input_ids": [5, 6, 7]}) == [((5,), False), ((6, 7), True)]
    without = {k: v for k, v in row.items() if k != "completion"}
    assert encoded(tokenizer, without | {"messages": None}) == encoded(tokenizer, row)


def test_ids_of_another_text_or_tokenizer_are_not(tokenizer: Any) -> None:
    ids = split_apart(tokenizer, "the answer")
    plain = {"prompt": "Say", "completion": "the answer"}
    ours = encoded(tokenizer, plain)
    row = {**plain, "input_ids": [5, *ids], "completion_mask": [0] + [1] * len(ids)}
    assert encoded(tokenizer, {**row, "completion": "another"}) == encoded(
        tokenizer, {**plain, "completion": "another"}
    )
    assert encoded(tokenizer, {**row, "input_ids": [10**6, *ids]}) == ours
    assert encoded(tokenizer, row, remove=["xyz"]) == ours  # the text may be changed, so it decides
    assert encoded(tokenizer, row) != ours


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 2], "completion_mask": [0, 0]}, "marks no token"),
        ({"input_ids": [1, 2], "completion_mask": [1]}, "has another length"),
        ({"input_ids": "12"}, "expected a list of token ids"),
        ({"input_ids": [1, -2]}, "expected a list of token ids"),
        ({"input_ids": [1, 10**6]}, "of another tokenizer"),
        ({"input_ids": [1, 2], "completion_mask": [0, 2]}, "expected a list of 0 and 1"),
    ],
)
def test_refused(tokenizer: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        encoded(tokenizer, row)
