"""Generative tasks: prompts, judging, samples, metrics."""

import pytest

from statewise.component import kinds, parse
from statewise.errors import DataError, RecipeError
from statewise.evals.generative import pass_at
from statewise.models.generate import InProcessSampler


def task(kind, **settings):
    return parse("task", {"kind": kind, **settings}, "tasks[0]")


GSM8K = [
    {"question": "Tom has 3. He buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "A car costs $1,000 more than $500. Its price?", "answer": "#### 1,500"},
]


def test_gsm8k_in_chat(write, context, engines):
    sampler = engines.sampler(["3 + 4 = 7\n#### 7", "The answer is $1500."])
    records = task("gsm8k", data=write("test.jsonl", GSM8K)).run(context(sampler))
    assert sampler.prompts[0] == f"<|im_start|>user\n{GSM8K[0]['question']}<|im_end|>\n<|im_start|>assistant\n"
    assert [r["score"] for r in records] == [1.0, 1.0]
    first = records[0]
    assert (first["id"], first["reference"], first["extracted"]) == ("0", "7", "7")
    assert first["response"] == "3 + 4 = 7\n#### 7" and first["prompt"][0]["content"] == GSM8K[0]["question"]
    assert first["stop_reason"] == "stop" and first["num_tokens"] > 5


def test_gsm8k_of_a_base_model(write, context, engines):
    sampler = engines.sampler([" 7\n#### 7\n\nQuestion: 2 + 2?\nAnswer: #### 4", "nothing"], stop_reason="length")
    records = task("gsm8k", data=write("test.jsonl", GSM8K), chat=False).run(context(sampler))
    assert sampler.prompts[0] == f"Question: {GSM8K[0]['question']}\nAnswer:"
    assert [r["score"] for r in records] == [1.0, 0.0]
    assert [r["stop_reason"] for r in records] == ["stop", "length"]
    assert records[0]["response"].strip() == "7\n#### 7"


def test_the_layouts_of_svamp_and_mawps(write, context, engines):
    row = {"ID": "chal-1", "Body": "There are 8 cats", "Question": "How many legs?", "Answer": 32.0}
    sampler = engines.sampler(["32"])
    records = task("svamp", data=write("s.jsonl", [row]), columns={"id": "ID"}).run(context(sampler))
    assert records[0]["id"] == "chal-1" and records[0]["score"] == 1.0
    assert "There are 8 cats. How many legs?" in sampler.prompts[0]
    row = {"input": "Sam had 9 and lost 2 .", "target": 7.0, "type": "singleeq"}
    assert task("mawps", data=write("m.jsonl", [row])).run(context(engines.sampler(["so 7 left"])))[0]["score"] == 1.0
    with pytest.raises(RecipeError, match=r"tasks\[0\]\.data: is missing"):
        task("mawps")


def test_training_data_are_asked_and_their_answers_are_the_reference(write, context, engines):
    asked, answer = {"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "It is 7.\n#### 7"}
    rows = [
        {"messages": [asked, answer]},
        {"prompt": [asked], "completion": [answer]},
        {"prompt": "3 + 4?", "completion": answer["content"]},
    ]
    sampler = engines.sampler(["#### 7"] * 3)
    records = task("generative", data=write("t.jsonl", rows)).run(context(sampler))
    assert [(r["reference"], r["score"]) for r in records] == [("7", 1.0)] * 3
    assert len(set(sampler.prompts)) == 1, "the answer is not in the prompt"
    with pytest.raises(DataError, match="no 'answer', which task 'generative' reads"):
        task("generative", data=write("u.jsonl", [{"messages": [asked]}])).run(context(sampler))


def test_any_file_with_columns_template_and_system(write, context, engines):
    data = write("q.jsonl", [{"id": "a", "q": "2 {+} 2?", "hint": "add", "gold": "four"}])
    chosen = task("generative", data=data, columns={"prompt": "q", "answer": "gold"}, template="{prompt} ({hint})")
    sampler = engines.sampler(["The answer is Four."])
    assert chosen.run(context(sampler))[0]["score"] == 1.0
    assert "2 {+} 2? (add)" in sampler.prompts[0]
    plain = chosen.model_copy(update={"system": "Be brief.", "chat": False})
    plain.run(context(sampler))
    assert sampler.prompts[0] == "Be brief.\n\n2 {+} 2? (add)"
    chat = chosen.model_copy(update={"system": "Be brief."})
    assert chat.run(context(sampler))[0]["prompt"][0] == {"role": "system", "content": "Be brief."}


def test_messages_are_asked_as_they_are(context, engines):
    sampler = engines.sampler(["#### 1"] * 3)
    records = task("tiny:math", count=3).run(context(sampler))
    assert all(p.endswith("<|im_start|>assistant\n") for p in sampler.prompts)
    assert records[0]["id"].startswith("math-test-") and records[0]["prompt"][0]["role"] == "user"
    assert sampler.sampling.temperature == 0 and len(sampler.sampling.stop_ids) == 1


def test_samples_give_average_and_pass_at_k(write, context, engines):
    chosen = task("gsm8k", data=write("test.jsonl", GSM8K), samples=3, temperature=1.0, top_p=0.9)
    sampler = engines.sampler(["7", "8", "7", "1", "2", "no"])
    records = chosen.run(context(sampler, seed=5))
    assert [r["score"] for r in records] == pytest.approx([2 / 3, 0.0])
    assert [s["extracted"] for s in records[1]["samples"]] == ["1", "2", None]
    assert (sampler.sampling.temperature, sampler.sampling.top_p) == (1.0, 0.9)
    extra = chosen.extra(records)
    assert extra["pass@1"] == pytest.approx(1 / 3)
    assert extra["pass@2"] == pytest.approx(0.5) and extra["pass@3"] == pytest.approx(0.5)
    assert extra["extracted_share"] == pytest.approx(5 / 6) and extra["truncated_share"] == 0.0
    other = engines.sampler(["7"] * 6)
    chosen.run(context(other, seed=6))
    assert other.sampling.seed != sampler.sampling.seed
    with pytest.raises(RecipeError, match="greedy samples are all equal"):
        task("gsm8k", samples=2)


def test_pass_at_is_the_share_of_subsets_with_a_right_one():
    from itertools import combinations

    for n in range(1, 7):
        for right in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations(range(n), k))
                share = sum(min(s) < right for s in subsets) / len(subsets)
                assert pass_at(k, n, right) == pytest.approx(share)


def test_limit_is_the_same_sample_for_every_seed(write, context, engines):
    rows = [{"prompt": f"q{i}", "answer": str(i)} for i in range(50)]
    data = write("q.jsonl", rows)

    def ids(limit, task_limit=None, seed=0):
        ran = task("generative", data=data, limit=task_limit)
        expected = min(task_limit or limit or 50, 50)
        return [r["id"] for r in ran.run(context(engines.sampler(["x"] * expected), limit=limit, seed=seed))]

    ten = ids(10)
    assert ten == ids(None, 10) == ids(3, 10, seed=9) and len(set(ten)) == 10
    assert ten != [str(i) for i in range(10)] and set(ids(5)) < set(ten) < set(ids(None))
    assert ids(None) == ids(100) == [str(i) for i in range(50)]


def test_ids_are_the_rows_own_only_where_they_differ(write, context, engines):
    twice = write("t.jsonl", [{"id": "a", "prompt": "x", "answer": "1"}] * 2)
    assert [r["id"] for r in task("generative", data=twice).run(context(engines.sampler(["1", "1"])))] == ["0", "1"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"q\.jsonl:1: no 'answer', which task 'generative' reads; the row has q, gold"),
        ({"columns": {"answer": "golt"}}, r"q\.jsonl:1: no column 'golt'.*did you mean 'gold'"),
        ({"columns": {"answer": "gold"}}, r"no column 'prompt'"),
        ({"columns": {"answer": "gold"}, "template": "{qq}"}, r"template '\{qq\}' can't be filled: no column 'qq'"),
        ({"columns": {"answer": "gold"}, "template": "{q"}, r"can't be filled"),
    ],
)
def test_bad_data_is_named(write, context, engines, settings, message):
    data = write("q.jsonl", [{"q": "x", "gold": "1"}])
    with pytest.raises(DataError, match=message):
        task("generative", data=data, **settings).run(context(engines.sampler(["1"])))


def test_chat_needs_a_template(write, context, engines, tokenizer):
    from copy import copy

    bare = copy(tokenizer)
    bare.chat_template = None
    data = write("test.jsonl", GSM8K[:1])
    make = context(engines.sampler(["7"]))
    without = type(make)(make.model, bare, make.sampler, None)
    assert task("gsm8k", data=data).run(without)[0]["prompt"].startswith("Question: ")
    with pytest.raises(RecipeError, match="no chat template"):
        task("gsm8k", data=data, chat=True).run(without)


def test_batching_changes_no_answer(model, tokenizer, context):
    chosen = task("tiny:math", count=12, max_new_tokens=24)
    records = [
        chosen.run(context(InProcessSampler(model, pad_id=0, max_rows=rows, batch_tokens=size)))
        for rows, size in ((64, 8192), (1, 8192), (5, 200))
    ]
    assert records[0] == records[1] == records[2]


def test_every_kind_is_registered_and_round_trips():
    known = kinds("task")
    expected = (
        "aime amc arc choice generative gsm8k mawps minerva mmlu svamp text "
        "tiny:beliefs tiny:facts tiny:math tiny:text truthfulqa"
    )
    assert set(expected.split()) <= set(known)
    for kind in expected.split():
        needs = {"data": "x.jsonl"} if known[kind].model_fields.get("data", None) else {}
        made = task(kind, **needs, limit=3)
        assert parse("task", made.to_plain(), "t") == made


def test_intervals_of_avg_and_pass_at_k(write, context, engines):
    from math import comb

    from statewise import stats

    data = write("test.jsonl", [{"prompt": f"{i}?", "answer": "7"} for i in range(4)])
    texts = ["7"] * 4 + ["7", "7", "1", "2"] + ["7", "1", "2", "3"] + ["1", "2", "3", "4"]
    chosen = task("generative", data=data, samples=4, temperature=1.0)
    extra = chosen.extra(chosen.run(context(engines.sampler(texts))))
    by_prompt = {k: [1 - comb(4 - c, k) / comb(4, k) for c in (4, 2, 1, 0)] for k in (1, 2, 4)}
    for k, values in by_prompt.items():
        low, high = stats.mean_interval(values)
        told = [extra[f"pass@{k}{end}"] for end in ("", "/low", "/high")]
        assert told == pytest.approx([sum(values) / 4, max(low, 0), min(high, 1)])
    assert extra["avg@4"] == pytest.approx(7 / 16) == pytest.approx(extra["pass@1"])
    assert extra["avg@4/low"] == pytest.approx(max(stats.mean_interval([1, 0.5, 0.25, 0]).low, 0))


def test_pass_at_k_is_unbiased():
    """Simulated: the mean of the estimator over n samples is the chance that k fresh ones hold a right one."""
    import numpy as np

    right = np.random.default_rng(0).binomial(8, 0.3, size=20_000)
    for k in (1, 3, 8):
        assert np.mean([pass_at(k, 8, int(c)) for c in right]) == pytest.approx(1 - 0.7**k, abs=0.01)
        naive = np.mean([1 - (1 - c / 8) ** k for c in right])
        assert k == 1 or naive != pytest.approx(1 - 0.7**k, abs=0.01), "the plug-in estimate is biased"


def test_competitions(write, context, engines):
    aime = write(
        "aime.jsonl", [{"id": 60, "problem": "p", "answer": "204"}, {"id": 61, "problem": "q", "answer": "025"}]
    )
    sampler = engines.sampler(["so \\boxed{204}", "\\boxed{25}"])
    records = task("aime", data=aime).run(context(sampler))
    assert [r["score"] for r in records] == [1.0, 1.0] and "final answer within \\boxed{}" in sampler.prompts[0]
    amc = write("amc.jsonl", [{"question": "q", "answer": 27.0}])
    assert task("amc", data=amc, chat=False).run(context(engines.sampler(["It is \\boxed{27}"])))[0]["score"] == 1.0


def test_minerva_compares_mathematics(write, context, engines):
    pytest.importorskip("math_verify")
    data = write(
        "m.jsonl", [{"problem": "p", "solution": "x = \\boxed{\\frac{1}{2} a}"}, {"problem": "q", "answer": "3"}]
    )
    records = task("minerva", data=data).run(context(engines.sampler(["\\boxed{a/2}", "\\boxed{4}"])))
    assert [r["score"] for r in records] == [1.0, 0.0] and records[0]["reference"] == "\\frac{1}{2} a"
    assert "value" not in records[0]
    plain = task("minerva", data=data, verifier=None).run(context(engines.sampler(["\\boxed{a/2}", "\\boxed{3}"])))
    assert [r["score"] for r in plain] == [0.0, 1.0]


def test_a_verifier_of_ones_own(write, context, engines):
    data = write("g.jsonl", [{"prompt": "p", "answer": "blue"}])
    chosen = task("generative", data=data, verifier={"kind": "exact", "normalise": False})
    assert chosen.run(context(engines.sampler(["blue"])))[0]["score"] == 1.0
    assert chosen.run(context(engines.sampler(["It is blue"])))[0]["score"] == 0.0
    assert parse("task", chosen.to_plain(), "t") == chosen
