"""Verifiers: what they accept and reject, the test before training, time limits, and faults of a user's function."""

import time
from pathlib import Path
from typing import Any

import pytest

from statewise.errors import DataError, RecipeError
from statewise.sources.judging import scored, self_test
from statewise.types import Example
from statewise.verifier import Verifier, parse_verifier


def verifier(kind: str, **settings: Any) -> Verifier:
    return parse_verifier({"kind": kind, **settings}, "signal.reward.verifier")


def example(answer: Any, **metadata: Any) -> Example:
    return Example("one", answer=answer, metadata=metadata)


CAPITAL = {"choices": ["Rome", "Paris", "Oslo"]}
CASES: list[tuple[str, dict, Example, dict[str, float]]] = [
    (
        "answer",
        {},
        example("She has 9 * 2 = 18 eggs.\n#### 18"),
        {"#### 18": 1, "so 9 * 2 = 18.0": 1, "The answer is 18 eggs.": 1, "\\boxed{18}": 1, "18 or 19": 0, "": 0},
    ),
    ("answer", {}, example("1,234"), {"1234": 1, "$1,234.00": 1, "1235": 0}),
    ("answer", {}, example(7), {"7": 1, "-7": 0}),
    (
        "choice",
        {},
        example(1, **CAPITAL),
        {
            "B": 1,
            "(b)": 1,
            "The answer is Paris.": 1,
            "B. Paris": 1,
            "Answer: B": 1,
            "A": 0,
            "B, C": 0,
            "Rome Paris": 0,
        },
    ),
    ("choice", {}, example("B", **CAPITAL), {"Hm.\nparis": 1, "Oslo": 0, "": 0}),
    ("choice", {}, example("Paris", **CAPITAL), {"b": 1, "c": 0}),
    ("exact", {}, example("Paris"), {"paris.": 1, " Paris ": 1, "Paris, France": 0, "": 0}),
    ("exact", {"normalise": False}, example("Paris"), {"Paris ": 1, "paris": 0, "": 0}),
    (
        "regex",
        {"pattern": r"Answer: (\S+)"},
        example("4"),
        {"Answer: 3 Answer: 4.0": 1, "4": 0, "Answer: 4 Answer: 3": 0},
    ),
    ("regex", {"pattern": r"<think>.+</think>"}, example(None), {"<think>so</think>": 1, "<think></think>": 0, "": 0}),
]


@pytest.mark.parametrize(("kind", "settings", "asked", "texts"), CASES)
def test_scores(kind: str, settings: dict, asked: Example, texts: dict[str, float]):
    judge = verifier(kind, **settings)
    assert {text: judge.score(text, asked) for text in texts} == texts


def numbered(*answers: Any, **metadata: Any) -> list[Example]:
    return [Example(str(i), answer=a, metadata=metadata) for i, a in enumerate(answers)]


TESTED = {
    "answer": ({}, numbered(3, "#### 4", "5.5", "1/2")),
    "choice": ({}, numbered(0, "B", "Oslo", **CAPITAL)),
    "exact": ({}, numbered("Paris", "Rome", "Oslo")),
    "regex": ({"pattern": r"#### (\S+)", "sample": "#### {answer}"}, numbered("3", "4", "5")),
}


@pytest.mark.parametrize("kind", TESTED)
def test_the_self_test_passes(kind: str):
    settings, examples = TESTED[kind]
    self_test(verifier(kind, **settings), examples, Path("."), "signal.reward.verifier")


def test_boxed_mathematics():
    pytest.importorskip("math_verify")
    boxed = verifier("boxed")
    right = {
        "1/2": "\\boxed{0.5}",
        "\\frac{1}{2}": "so \\boxed{\\frac12}",
        "x^2+1": "\\boxed{1 + x^2}",
        "7": "\\boxed{\\boxed{7}}",
    }
    assert {a: boxed.score(text, example(a)) for a, text in right.items()} == dict.fromkeys(right, 1.0)
    wrong = {"5": "\\boxed{3, 4, 5}", "4": "4", "3": "\\boxed{3} no: \\boxed{4}"}
    assert {a: boxed.score(text, example(a)) for a, text in wrong.items()} == dict.fromkeys(wrong, 0.0)
    self_test(boxed, numbered("1/2", "x^2", "12", "\\boxed{9}"), Path("."), "signal.reward.verifier")


class Lenient(Verifier, kind="lenient_for_tests"):
    """Accepts whatever the answer occurs in."""

    def score(self, text: str, example: Example) -> float:
        return float(str(example.answer) in text)


class Generous(Verifier, kind="generous_for_tests"):
    def score(self, text: str, example: Example) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("kind", "examples", "message"),
    [
        ("lenient_for_tests", numbered(3, 4, 5), "as much as to its reference answer '3'"),
        ("generous_for_tests", numbered(3, 4, 5), "gives 1 to ''"),
        ("answer", numbered("blue", "red"), "gives 0 to the reference answer of sample '0', 'blue'"),
        ("choice", numbered(5, **CAPITAL), "expected a number from 0 to 2"),
        ("exact", numbered(""), "gives 0 to the reference answer"),
        ("answer", numbered(3, None), "no reference answer"),
    ],
)
def test_the_self_test_refuses(kind: str, examples: list[Example], message: str):
    with pytest.raises((RecipeError, DataError), match=message):
        self_test(verifier(kind), examples, Path("."), "signal.reward.verifier")


FUNCTIONS = """
import time

def even(text, example):
    return len(text) % 2 == 0 and bool(text)

def broken(text, example):
    return example.metadata["no such field"]

def infinite(text, example):
    return float("inf")

def slow(text, example):
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return tmp_path


def test_a_function_of_the_user(folder: Path, monkeypatch: pytest.MonkeyPatch):
    judge = verifier("function", call="mine.py:even").opened(folder)
    assert (judge("ab", example(None)), judge("abc", example(None))) == (1.0, 0.0)
    monkeypatch.chdir(folder)
    assert verifier("function", call="mine.py:even").opened(folder / "elsewhere")("ab", example(None)) == 1.0
    for call, message in {"mine.py:odd": "defines no function 'odd'", "other.py:even": "no file"}.items():
        with pytest.raises(RecipeError, match=message):
            verifier("function", call=call).opened(folder)
    with pytest.raises(RecipeError, match=r"call: received 'even', expected 'file\.py:function'"):
        verifier("function", call="even")
    with pytest.raises(RecipeError, match="defines no function 'evn'; did you mean 'even'"):
        verifier("function", call="mine.py:evn").opened(folder)


def test_a_function_of_another_trainer_is_refused_with_its_signature(folder: Path):
    (folder / "theirs.py").write_text("def reward(completions, **kwargs):\n    return [1.0 for c in completions]\n")
    with pytest.raises(RecipeError, match=r"is reward\(completions, \*\*kwargs\), expected reward\(text, example\)"):
        verifier("function", call="theirs.py:reward").opened(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [("broken", r"failed on sample 'one': KeyError: .*\(.*mine\.py:\d+\)"), ("infinite", "received inf")],
)
def test_a_fault_of_a_function_names_the_sample(name: str, message: str, folder: Path):
    function = verifier("function", call=f"mine.py:{name}")
    with pytest.raises(DataError, match=message):
        scored(function, function.opened(folder), "text", example(None))


def test_an_example_reads_like_its_row():
    row = Example("one", text="q", answer="4", metadata={"level": 3, "solution": "4"})
    assert (row["level"], row.get("level"), row.get("gone"), row.get("gone", 0)) == (3, 3, None, 0)
    with pytest.raises(KeyError, match="no column 'answer' in this row, which has: level, solution"):
        row["answer"]


def test_time_limits(folder: Path):
    slow = verifier("function", call="mine.py:slow", time_limit=0.2)
    started = time.monotonic()
    assert scored(slow, slow.opened(folder), "text", example(None)) is None
    hopeless = verifier("regex", pattern="(a+)+$", time_limit=0.2)
    assert scored(hopeless, hopeless.score, "a" * 40 + "b", example("a")) is None
    assert time.monotonic() - started < 3


def test_unknown_kinds_and_patterns_are_explained():
    with pytest.raises(RecipeError, match="did you mean 'answer'"):
        verifier("answr")
    with pytest.raises(RecipeError, match="no regular expression"):
        verifier("regex", pattern="(")
