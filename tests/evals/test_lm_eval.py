"""lm-eval on our engines gives what it gives on its own `hf` model, on tasks of local YAML files."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from statewise import evals
from statewise.component import parse
from statewise.errors import DataError, RecipeError

COLOURS = ["red", "green", "blue", "white"]
CHOICE = """
task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}, {metric: acc_norm, aggregation: mean}]
"""
GENERATE = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}} ="
doc_to_target: "{{target}}"
generation_kwargs: {until: ["\\n", "s"], max_gen_toks: 70, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
ROLLING = """
task: prose
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks")
    rows = [
        {
            "question": f"{i} + {i}",
            "choices": [COLOURS[i % 4], "a long answer of many words", COLOURS[(i + 1) % 4] + " one"],
            "answer": i % 3,
            "target": str(2 * i),
            "text": " ".join(["One day a cat went out and saw a bird."] * (1 + 40 * (i == 0))) + f" {i}",
        }
        for i in range(7)
    ]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in {"colours": CHOICE, "sums": GENERATE, "prose": ROLLING}.items():
        (path / f"{name}.yaml").write_text(text.replace("FILE", str(path / "rows.jsonl")))
    return path


@pytest.fixture(scope="module")
def theirs(tasks: Path, model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Samples of lm-eval with its own model class, by task."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = simple_evaluate(lm, tasks=["colours", "sums", "prose"], task_manager=manager, bootstrap_iters=0)
    return found["samples"]


def ours(policy: Any, tasks: Path, name: str, **settings: Any) -> Any:
    return evals.run(policy, [{"kind": "lm_eval", "task": name, "include": str(tasks), **settings}])["lm_eval"]


def test_choices_are_theirs(
    policy: Any, tasks: Path, theirs: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    result = ours(policy, tasks, "colours")
    assert capsys.readouterr().err == ""
    assert result.metric == "score" and result.purpose == "retention"
    assert [r["score"] for r in result.records] == [s["acc"] for s in theirs["colours"]]
    assert [r["acc_norm"] for r in result.records] == [s["acc_norm"] for s in theirs["colours"]]
    for record, sample in zip(result.records, theirs["colours"], strict=True):
        for (value, greedy), (expected, as_greedy) in zip(record["response"], sample["filtered_resps"], strict=True):
            assert value == pytest.approx(expected, abs=1e-4) and greedy == as_greedy
    first = result.records[0]
    assert first["id"] == "0" and first["prompt"].startswith("Question: 0 + 0") and len(first["choices"]) == 3
    assert ours(policy, tasks, "colours", measure="acc_norm", limit=3).n == 3


def test_texts_are_theirs(policy: Any, tasks: Path, theirs: dict[str, Any]) -> None:
    """Seventy tokens: more than are sampled between two looks for a stop text."""
    result = ours(policy, tasks, "sums")
    assert [r["response"] for r in result.records] == [s["filtered_resps"] for s in theirs["sums"]]
    assert any(len(r["response"][0]) > 0 for r in result.records)


def test_rolling_sums_are_theirs(policy: Any, tasks: Path, theirs: dict[str, Any]) -> None:
    """The first text is longer than the model's context."""
    result = ours(policy, tasks, "prose", measure="word_perplexity")
    assert (result.metric, result.higher_is_better, result.purpose) == ("nats_per_word", False, "probe")
    for record, sample in zip(result.records, theirs["prose"], strict=True):
        total, words = sample["word_perplexity"]
        assert record["score"] * record["weight"] == pytest.approx(-total, abs=1e-2) and record["weight"] == words


def test_greedy_is_seen(policy: Any, tokenizer: Any, context: Any) -> None:
    """The model's own greedy continuation is greedy; another one is not."""
    from statewise.models.answers import AnswerScorer
    from statewise.models.generate import InProcessSampler
    from statewise.types import Sampling

    prompt = tokenizer.encode("One day a")
    sampler = InProcessSampler(policy.model, pad_id=0)
    own = list(sampler.generate([prompt], Sampling(max_tokens=5, temperature=0.0))[0].tokens)
    other = [*own[:-1], (own[-1] + 1) % 300]
    scorer = AnswerScorer(policy.model, pad_id=0)
    (((first, greedy), (second, not_greedy)),) = scorer.judge_answers([(prompt, [own, other])])
    assert (greedy, not_greedy) == (True, False) and first > second
    assert scorer.score_answers([(prompt, [own, other])]) == [[first, second]]


def test_refusals(policy: Any, tasks: Path) -> None:
    with pytest.raises(RecipeError, match="no task 'colour' in .*did you mean 'colours'"):
        ours(policy, tasks, "colour")
    with pytest.raises(RecipeError, match="has no measure 'accuracy'.*acc"):
        ours(policy, tasks, "colours", measure="accuracy")
    with pytest.raises(RecipeError, match="has no filter 'strict'"):
        ours(policy, tasks, "sums", filter="strict")
    with pytest.raises(RecipeError, match="no number an example"):
        ours(policy, tasks, "prose", measure=None)
    broken = tasks / "broken"
    broken.mkdir()
    (broken / "gone.yaml").write_text(CHOICE.replace("colours", "gone").replace("FILE", "/no/such/file.jsonl"))
    with pytest.raises(DataError, match="lm-eval could not run 'gone'"):
        ours(policy, broken, "gone")


def test_without_the_package(policy: Any, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from statewise.errors import MissingExtra

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingExtra, match=r"statewise\[lm-eval\]"):
        ours(policy, tasks, "colours")


def test_is_a_setting_like_any_other() -> None:
    made = parse("task", {"kind": "lm_eval", "task": "x", "fewshot": 5}, "t")
    assert parse("task", made.to_plain(), "t") == made
