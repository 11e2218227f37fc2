"""The tiny tasks: disjoint splits, right answers, stable rows, refusals."""

import hashlib
import json
import re
import subprocess
import sys
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statewise.errors import DataError
from statewise.tiny import TASKS, arithmetic, knowledge, mixture, stories, tasks
from statewise.tiny.score import final_answer

SIZES = {"tiny:math": 400, "tiny:facts": 400, "tiny:beliefs": 340, "tiny:text": 400}


def question_of(row: dict) -> str:
    return row["text"] if "text" in row else row["prompt"][0]["content"]


def recompute(question: str) -> int:
    """The answer by reading the words, without the generator's own arithmetic."""
    start, *moves = (int(n) for n in re.findall(r"\d+", question))
    sentences = re.findall(r"[^.]*\d+[^.]*\.", question)[1:]
    value = start
    for sentence, number in zip(sentences, moves, strict=True):
        if "times" in sentence:
            value *= number
        elif re.search(r"buys|finds|gets", sentence):
            value += number
        else:
            value -= number
    return value


@pytest.mark.parametrize("name", TASKS)
def test_splits_share_no_question(name: str) -> None:
    train = {question_of(row) for row in tasks.rows(name, "train", SIZES[name])}
    test = {question_of(row) for row in tasks.rows(name, "test", SIZES[name])}
    assert len(train) == len(test) == SIZES[name]
    assert not train & test


@pytest.mark.parametrize("name", TASKS)
def test_a_smaller_count_is_a_prefix_and_ids_are_unique(name: str) -> None:
    rows = tasks.rows(name, "test", 50)
    assert tasks.rows(name, "test", 20) == rows[:20]
    other_seed = tasks.rows(name, "test", 50, seed=1)
    assert other_seed != rows
    assert len({row["id"] for row in rows + other_seed}) == 100


def test_test_calculations_are_never_trained_on() -> None:
    train, test = (
        {row["completion"][0]["content"] for row in tasks.math_problems(split, 3000)} for split in ("train", "test")
    )
    assert not train & test


def test_retold_answers_are_right_and_by_several_hands() -> None:
    rows = tasks.math_restyled("train", 200)
    openings = {re.sub(r"\d+", "N", row["completion"][0]["content"].split(".")[0]) for row in rows}
    assert openings == {"Start with N", "At first there are N", "N at the start"}
    for row, plain in zip(rows, tasks.math_problems("train", 200), strict=True):
        told, _, answer = row["completion"][0]["content"].partition("\n#### ")
        start, *pairs = re.findall(r"\d+", told)
        worked = re.findall(r"(\d+) [-+*] (\d+) = (\d+)", plain["completion"][0]["content"])
        assert (row["id"], row["prompt"], row["answer"]) == (plain["id"], plain["prompt"], plain["answer"])
        assert [start, *pairs] == [worked[0][0], *(n for _, k, v in worked for n in (k, v))]
        assert answer == row["answer"]


def test_hinted_problems_can_only_be_read_off() -> None:
    rows = tasks.math_hinted("train", 200)
    right = 0
    for row, plain in zip(rows, tasks.math_problems("train", 200), strict=True):
        question, hint, again = row["prompt"]
        assert [question] == [again] == plain["prompt"]
        told, own = hint["content"], row["completion"][0]["content"]
        assert final_answer(told) == final_answer(own) == row["answer"]
        results = [v for _, _, v in re.findall(r"(\d+) [-+*] (\d+) = (\d+)", own)]
        assert set(results) <= set(re.findall(r"\d+", told))
        right += row["answer"] == plain["answer"]
    assert right < 20


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["plain", "terse", "verbose"]), st.sampled_from([(1,), (2, 3), (4,)]))
def test_every_answer_is_right_in_every_style(seed: int, style: str, steps: tuple[int, ...]) -> None:
    for row in tasks.math_problems("train", 10, seed=seed, steps=steps, style=style):
        assert int(row["answer"]) == recompute(question_of(row))
        content = row["completion"][0]["content"]
        assert final_answer(content) == row["answer"]
        equations = re.findall(r"(\d+) ?([-+*]) ?(\d+) ?= ?(\d+)", content)
        assert len(equations) == row["steps"]
        value = equations[0][0]
        for left, operation, right, result in equations:
            assert left == value
            assert arithmetic.apply(int(left), operation, int(right)) == int(result)
            value = result
        assert value == row["answer"]


def test_style_changes_the_writing_only() -> None:
    plain, terse = (tasks.math_problems("train", 30, style=style) for style in ("plain", "terse"))
    for one, other in zip(plain, terse, strict=True):
        assert one["completion"] != other["completion"]
        assert {k: v for k, v in one.items() if k != "completion"} == {
            k: v for k, v in other.items() if k != "completion"
        }


def test_the_mix_of_steps_is_exact() -> None:
    assert [row["steps"] for row in tasks.math_problems("test", 5)] == [2, 3, 2, 3, 2]


@pytest.mark.parametrize("name", ["tiny:facts", "tiny:beliefs"])
def test_multiple_choice_has_distinct_choices_and_the_true_answer(name: str) -> None:
    truths = {topic.truth for topic in knowledge.fact_topics() + knowledge.belief_topics()}
    positions = set()
    for row in tasks.rows(name, "test", SIZES[name]):
        assert len(set(row["choices"])) == len(row["choices"]) == (4 if name == "tiny:facts" else 3)
        assert row["choices"][row["answer"]] in truths
        positions.add(row["answer"])
    assert len(positions) == len(row["choices"])


def test_beliefs_offer_the_common_belief() -> None:
    by_question = {q: topic for topic, q in knowledge.questions("beliefs", "test")}
    for row in tasks.beliefs("test", 100):
        topic = by_question[question_of(row)]
        assert topic.belief in row["choices"] and row["choices"][row["answer"]] == topic.truth


def test_every_topic_is_in_both_splits() -> None:
    for kind in ("facts", "beliefs"):
        train, test = ({topic.key for topic, _ in knowledge.questions(kind, split)} for split in ("train", "test"))
        assert train == test


def test_pretraining_text_holds_no_test_row() -> None:
    random = Random("leak")
    documents = "\n".join(mixture.draw_document(random, mixture.MIXTURE) for _ in range(4000))
    for row in tasks.facts("test", 300) + tasks.beliefs("test", 300):
        assert f">user\n{question_of(row)}<" not in documents
    for row in tasks.texts("test", 300):
        assert row["text"] not in documents
    for row in tasks.math_problems("test", 2000):
        assert f"assistant\n{row['completion'][0]['content']}<" not in documents


def test_truth_shares_cover_the_range_evenly() -> None:
    shares = sorted(mixture.truth_shares().values())
    assert (shares[0], shares[-1]) == pytest.approx(mixture.TRUTH_SHARE)
    assert max(b - a for a, b in pairwise(shares)) < 0.02


def test_stories_split_by_their_text() -> None:
    assert all(stories.split_of(row["text"]) == "test" for row in tasks.texts("test", 50))


def test_rows_are_the_same_in_every_process_and_version() -> None:
    """A change of these digests changes every score ever recorded: bump nothing here without a changelog entry."""
    code = (
        "import json; from statewise.tiny import TASKS, tasks;"
        "print(json.dumps([tasks.rows(n, s, 60, 3) for n in TASKS for s in ('train', 'test')]))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    here = json.dumps([tasks.rows(n, s, 60, 3) for n in TASKS for s in ("train", "test")])
    assert json.loads(other) == json.loads(here)
    assert hashlib.sha256(here.encode()).hexdigest()[:16] == "d36836c916382b95"


def test_pairs_are_a_right_and_a_wrong_solution_of_the_same_problems() -> None:
    rows = tasks.math_pairs("train", 400, style="terse")
    plain = tasks.math_problems("train", 400, style="terse")
    assert [(r["prompt"], r["chosen"], r["answer"]) for r in rows] == [
        (p["prompt"], p["completion"], p["answer"]) for p in plain
    ]
    for row in rows:
        chosen, rejected = (row[name][0]["content"] for name in ("chosen", "rejected"))
        wrong = rejected.split("#### ")[1]
        assert wrong != row["answer"] == chosen.split("#### ")[1]
        steps = rejected.split("\n")[0].split("; ")
        results = [int(step.split("=")[1]) for step in steps]
        assert min(results) >= 1 and str(results[-1]) == wrong
        lefts = [int(re.match(r"\d+", step)[0]) for step in steps]
        assert lefts[1:] == results[:-1], "the steps after the slip go on from its result"
        slips = sum(int(eval_step(s)) != r for s, r in zip(steps, results, strict=True))
        assert slips == 1


def eval_step(step: str) -> int:
    left, operation, right = re.match(r"(\d+)([-+*])(\d+)", step).groups()
    return arithmetic.apply(int(left), operation, int(right))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tasks.rows("tiny:maths", "test", 1), "tiny:maths.*tiny:math, tiny:math_pairs, .*tiny:facts"),
        (lambda: tasks.rows("tiny:math", "dev", 1), "split: got 'dev'"),
        (lambda: tasks.rows("tiny:math", "test", -1), "count: got -1"),
        (lambda: tasks.facts("test", 10_000), "ask for at most"),
        (lambda: tasks.math_problems("test", 1, style="long"), "style: got 'long'"),
        (lambda: tasks.math_problems("test", 1, steps=(0,)), "steps: got"),
        (lambda: tasks.math_problems("test", 1, steps=()), "steps: got"),
    ],
)
def test_refusals_say_what_was_received_and_expected(call, words: str) -> None:
    with pytest.raises(DataError, match=words):
        call()
