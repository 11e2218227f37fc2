"""Choice by likelihood: what is compared, both normalisations, MMLU, TruthfulQA, and independence of batching."""

import math

import pytest
import torch

from statewise.component import parse
from statewise.errors import DataError
from statewise.evals.choice import right_index
from statewise.evals.truthful import PRIMER, multiple_choice
from statewise.models.answers import AnswerScorer
from statewise.models.score import InProcessScorer


def task(kind, **settings):
    return parse("task", {"kind": kind, **settings}, "tasks[0]")


ROWS = [
    {"id": "a", "prompt": "Sky?", "choices": ["red", "blue", "green and yellow"], "answer": 1},
    {"id": "b", "prompt": "Grass?", "choices": ["red", "green"], "answer": "B"},
    {"id": "c", "prompt": "Sun?", "choices": ["yellow", "black"], "answer": "yellow"},
]


def test_the_likeliest_choice_is_picked(write, context, engines):
    scorer = engines.scorer(" blue", " green", "black")
    records = task("choice", data=write("c.jsonl", ROWS), chat=False).run(context(scorer=scorer))
    assert [r["score"] for r in records] == [1.0, 1.0, 0.0]
    assert [r["picked"] for r in records] == [1, 1, 1] and [r["answer"] for r in records] == [1, 1, 0]
    assert scorer.seen[:3] == ["Sky? red", "Sky? blue", "Sky? green and yellow"]
    assert all(len(r["logprobs"]) == len(r["choices"]) == len(r["num_tokens"]) for r in records)


def test_in_chat_no_separator(write, context, engines):
    scorer = engines.scorer("blue")
    task("choice", data=write("c.jsonl", ROWS[:1])).run(context(scorer=scorer))
    assert scorer.seen[1] == "<|im_start|>user\nSky?<|im_end|>\n<|im_start|>assistant\nblue"


def test_sum_and_mean_a_token(write, context):
    """Against a scorer whose every token costs one nat: the shorter answer wins by sum, nobody by mean."""

    class Scorer:
        def score(self, sequences, needs):
            return [{"logprobs": [-1.0] * len(s)} for s in sequences]

    row = {"prompt": "p", "choices": ["a long answer of many words", "no"], "answer": 0}
    data = write("c.jsonl", [row])
    by_sum, by_token = (
        task("choice", data=data, normalize=n).run(context(scorer=Scorer()))[0] for n in ("sum", "token")
    )
    assert by_sum["score"] == 0.0 and by_sum["picked"] == 1
    assert by_token["score"] == 1.0 and by_token["picked"] == 0, "equal means: the first"
    assert by_sum["score_token"] == by_token["score_token"] == 1.0
    extra = task("choice", data=data).extra([by_sum])
    assert extra["accuracy_sum"] == 0.0 and extra["accuracy_token"] == 1.0


def reference_logprob(model, tokenizer, prompt, answer):
    ids = tokenizer.encode(prompt), tokenizer.encode(answer)
    with torch.no_grad():
        logp = model(input_ids=torch.tensor([ids[0] + ids[1]])).logits[0, :-1].log_softmax(-1)
    return sum(logp[len(ids[0]) - 1 + i, t].item() for i, t in enumerate(ids[1]))


def test_likelihoods_are_those_of_the_model(write, model, tokenizer, context):
    scorer = InProcessScorer(model, pad_id=0)
    records = task("choice", data=write("c.jsonl", ROWS), chat=False).run(context(scorer=scorer))
    for row, record in zip(ROWS, records, strict=True):
        expected = [reference_logprob(model, tokenizer, row["prompt"], f" {c}") for c in row["choices"]]
        assert record["logprobs"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", ["tiny:facts", "tiny:beliefs"])
def test_batching_changes_no_score(model, context, kind):
    chosen = task(kind, count=24)
    expected = chosen.run(context(scorer=InProcessScorer(model, pad_id=0, batch_tokens=1)))
    for engine in (InProcessScorer, AnswerScorer):
        for size, pad in ((8192, 0), (1, 0), (100, 7)):
            records = chosen.run(context(scorer=engine(model, pad_id=pad, batch_tokens=size)))
            for ours, theirs in zip(records, expected, strict=True):
                assert ours["picked"] == theirs["picked"]
                assert ours["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-5)


def test_default_sizes_are_available(context):
    for kind in ("tiny:facts", "tiny:beliefs", "tiny:math", "tiny:text"):
        assert len(task(kind).chosen(context())) >= 350


def test_a_long_prompt_loses_its_beginning(write, context, engines):
    scorer = engines.scorer("red")
    row = {"prompt": "x y " * 400 + "Sky?", "choices": ["red", "blue"], "answer": 0}
    task("choice", data=write("c.jsonl", [row]), chat=False).run(context(scorer=scorer))
    assert all(text.startswith(("x y", " x", "y", " y")) for text in scorer.seen)
    assert scorer.seen[0].removesuffix("red")[-50:] == scorer.seen[1].removesuffix("blue")[-50:]
    assert len(scorer.tokenizer.encode(scorer.seen[0])) <= 512


MMLU = {"subject": "abstract_algebra", "question": "2 + 2?", "choices": ["3", "4", "5", "6"], "answer": 1}


def test_mmlu(write, context, engines):
    scorer = engines.scorer("Answer: B")
    record = task("mmlu", data=write("m.jsonl", [MMLU])).run(context(scorer=scorer))[0]
    assert record["score"] == 1.0 and record["choices"] == list("ABCD")
    assert scorer.seen[1] == (
        "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
        "2 + 2?\nA. 3\nB. 4\nC. 5\nD. 6\nAnswer: B"
    )
    asked = engines.scorer("assistant\nB")
    assert task("mmlu", data=write("m.jsonl", [MMLU]), chat=True).run(context(scorer=asked))[0]["score"] == 1.0


HEAD = "Type,Category,Question,Best Answer,Correct Answers,Incorrect Answers,Source\n"
TRUTHFUL = HEAD + 'A,M,Why?,It just is,"It just is; Nobody knows.; ","Magic; Aliens, of course",url\n'


def test_truthfulqa_reads_the_csv(write, context, engines):
    data = write("t.csv", TRUTHFUL)
    scorer = engines.scorer("It just is.")
    record = task("truthfulqa", data=data).run(context(scorer=scorer))[0]
    assert record["choices"] == ["It just is.", "Nobody knows.", "Magic.", "Aliens, of course."]
    assert record["num_true"] == 2 and record["mc1"] == record["score"] == 1.0
    assert record["prompt"].startswith(f"Q: {PRIMER[0][0]}\nA: {PRIMER[0][1]}\n\nQ: ")
    assert record["prompt"].endswith("Barcelona, Spain.\n\nQ: Why?\nA:")
    assert scorer.seen[0].endswith("\n\nQ: Why?\nA: It just is.")
    bare = task("truthfulqa", data=data, primer=False, measure="mc2").run(context(scorer=scorer))[0]
    assert bare["prompt"] == "Q: Why?\nA:" and bare["score"] == bare["mc2"]
    chat = task("truthfulqa", data=data, chat=True).run(context(scorer=scorer))[0]["prompt"]
    assert [m["role"] for m in chat] == ["user", "assistant"] * 6 + ["user"] and chat[-1]["content"] == "Why?"


def test_mc1_and_mc2_by_hand():
    logs = [math.log(p) for p in (0.2, 0.3, 0.1, 0.4)]
    assert multiple_choice(logs, 2) == pytest.approx((0.0, 0.5))
    assert multiple_choice(logs, 3) == pytest.approx((0.0, 0.6))
    assert multiple_choice([math.log(p) for p in (0.2, 0.1, 0.1)], 1) == pytest.approx((1.0, 0.5))
    assert multiple_choice([0.0, 0.0], 1)[0] == 0.0, "the best answer must win"
    assert multiple_choice([-2000.0, -2001.0], 1) == pytest.approx((1.0, 1 / (1 + math.exp(-1))))


FOUND = [(0, 0), (1, 1), ("B", 1), ("a", 0), ("1", 1), ("green", 1)]


@pytest.mark.parametrize(("answer", "expected"), [*FOUND, (" red", None), (2, None), (True, None)])
def test_right_index(answer, expected):
    if expected is None:
        with pytest.raises(DataError, match="expected an index below 2, a letter up to B"):
            right_index(answer, ["red", "green"])
    else:
        assert right_index(answer, ["red", "green"]) == expected


def test_choices_that_are_numbers_are_found_as_choices_last():
    assert right_index(1, [3, 1]) == 1
    assert right_index("7", ["3", "7"]) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p", "answer": 0}, r"c\.jsonl:1: choices: received None, expected a list of at least two"),
        ({"prompt": "p", "choices": ["x"], "answer": 0}, "at least two texts"),
        ({"prompt": "p", "choices": ["x", "y"]}, r"c\.jsonl:1: answer: received None"),
    ],
)
def test_bad_rows_are_named(write, context, row, message):
    with pytest.raises(DataError, match=message):
        task("choice", data=write("c.jsonl", [row])).run(context())


def test_an_empty_choice_is_refused(write, context, engines):
    data = write("c.jsonl", [{"prompt": "p", "choices": ["x", ""], "answer": 0}])
    with pytest.raises(DataError, match="has no tokens"):
        task("choice", data=data).run(context(scorer=engines.scorer("x")))


def test_arc(write, context, engines):
    choices = {"text": ["ice", "steam", "rock"], "label": ["1", "2", "3"]}
    data = write("arc.jsonl", [{"id": "Mercury_7", "question": "What is hot?", "choices": choices, "answerKey": "2"}])
    scorer = engines.scorer(" steam")
    records = task("arc", data=data).run(context(scorer=scorer))
    assert records[0]["id"] == "Mercury_7" and records[0]["score"] == 1.0
    assert scorer.seen[0] == "Question: What is hot?\nAnswer: ice"
    wrong = write("wrong.jsonl", [{"question": "q", "choices": choices, "answerKey": "A"}])
    with pytest.raises(DataError, match=r"wrong\.jsonl:1: answerKey: received 'A', expected one of the labels"):
        task("arc", data=wrong).run(context(scorer=scorer))


def test_a_character(write, context):
    """lm-eval's acc_norm: the sum divided by the length of the choice's text."""

    class Scorer:
        def score(self, sequences, needs):
            return [{"logprobs": [-1.0] * len(s)} for s in sequences]

    row = {"prompt": "p", "choices": ["12345", "and"], "answer": 1}
    record = task("choice", data=write("c.jsonl", [row]), normalize="character").run(context(scorer=Scorer()))[0]
    lengths = [n / len(text) for n, text in zip(record["num_tokens"], row["choices"], strict=True)]
    assert record["picked"] == lengths.index(min(lengths)) and record["score"] == record["score_character"]
