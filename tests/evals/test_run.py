"""`evals.run`: models and tasks it takes, results, files, and the paired comparison."""

import json
import math
from dataclasses import asdict

import pytest

from statewise import evals, stats
from statewise.component import Task
from statewise.errors import DataError, RecipeError
from statewise.evals.compare import paired
from statewise.evals.results import summarise

RECORDS = ({"id": "a", "score": 1.0}, {"id": "b", "score": 0.0}, {"id": "c", "score": 1.0})


class Fixed(Task, kind="evals:fixed"):
    """Gives the scores it was made with."""

    scores: list[float] = [1.0, 0.0]
    name: str | None = None

    def run(self, context):
        return [{"id": str(i), "score": s, "seed": context.seed} for i, s in enumerate(self.scores)]


def fixed(*scores, name=None):
    return Fixed(scores=list(scores), name=name)


TASKS = [
    "tiny:facts",
    {"kind": "tiny:math", "limit": 3, "max_new_tokens": 8, "name": "sums"},
    {"kind": "tiny:text", "count": 4},
]


def test_results_and_files(policy, tmp_path):
    seen = []
    results = evals.run(policy, TASKS, out=tmp_path / "out", limit=6, progress=lambda *a: seen.append(a))
    assert {name: r.n for name, r in results.items()} == {"tiny:facts": 6, "sums": 3, "tiny:text": 4}
    assert ("sums", 3, 3) in seen and ("tiny:facts", 6, 6) in seen
    files = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert files == ["summary.json", "sums.jsonl", "tiny_facts.jsonl", "tiny_text.jsonl"]
    rows = [json.loads(line) for line in (tmp_path / "out/sums.jsonl").read_text().splitlines()]
    assert rows == [json.loads(json.dumps(r)) for r in results["sums"].records]
    told = {"id", "score", "prompt", "response", "extracted", "reference", "stop_reason", "num_tokens"}
    assert told <= rows[0].keys()
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["tasks"]["sums"]["n"] == 3 and summary["limit"] == 6
    assert "records" not in summary["tasks"]["sums"] and summary["settings"][1]["max_new_tokens"] == 8


def test_the_same_twice_and_whatever_the_batch(policy, model):
    first = evals.run(policy, TASKS, limit=5)
    again = evals.run(model, TASKS, tokenizer=policy.tokenizer, limit=5, batch_tokens=100, seed=3)
    for name in first:
        assert again[name].mean == pytest.approx(first[name].mean, abs=1e-5)
        assert [r["id"] for r in again[name].records] == [r["id"] for r in first[name].records]
    assert again["sums"].records == first["sums"].records


def test_takes_a_path(policy, tmp_path):
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    task = {"kind": "tiny:facts", "count": 5}
    by_path, by_policy = (evals.run(m, [task])["tiny:facts"] for m in (tmp_path, policy))
    assert by_path.records == by_policy.records


def test_the_model_keeps_its_mode(policy, model):
    model.train()
    try:
        evals.run(policy, [{"kind": "tiny:facts", "count": 2}, {"kind": "tiny:math", "count": 1, "max_new_tokens": 2}])
        assert model.training

        class Broken(Task, kind="evals:broken"):
            def run(self, context):
                assert not context.model.training
                raise DataError("no")

        with pytest.raises(DataError):
            evals.run(policy, [Broken()])
        assert model.training
    finally:
        model.eval()


def test_own_tasks_and_engines(policy, engines):
    results = evals.run(policy, [fixed(1, 0, 1, 1)], seed=7)
    result = results["evals:fixed"]
    assert (result.metric, result.mean, result.records[0]["seed"]) == ("score", 0.75, 7)
    assert (result.low, result.high) == stats.wilson(3, 4)
    scripted = evals.run(policy, [{"kind": "tiny:math", "count": 2}], sampler=engines.sampler(["#### 1", "no"]))
    assert scripted["tiny:math"].extra["extracted_share"] == 0.5


def test_intervals():
    binary = summarise(fixed(), RECORDS)
    assert binary.mean == pytest.approx(2 / 3) and binary.se == pytest.approx(stats.mean_se([1, 0, 1])[1])
    assert (binary.low, binary.high) == pytest.approx(stats.wilson(2, 3))
    graded = summarise(fixed(), [{"id": i, "score": s} for i, s in enumerate((0.5, 0.25, 1.0))])
    assert (graded.low, graded.high) == pytest.approx(stats.mean_interval([0.5, 0.25, 1.0]))
    assert math.isnan(summarise(fixed(), [{"id": 1, "score": 0.5}]).se)
    assert set(asdict(binary)) >= {"name", "metric", "n", "mean", "se", "low", "high", "extra", "records"}


def test_records_survive_odd_text_and_numbers(policy, tmp_path):
    class Odd(Task, kind="evals:odd"):
        def run(self, context):
            return [{"id": "x", "score": 1, "text": "\ud83d é \x00", "value": math.nan}]

    evals.run(policy, [Odd()], out=tmp_path)
    assert json.loads((tmp_path / "evals_odd.jsonl").read_text()) == {
        "id": "x", "score": 1, "text": "\ud83d é \x00", "value": None,
    }  # fmt: skip
    assert json.loads((tmp_path / "summary.json").read_text())["tasks"]["evals:odd"]["se"] is None


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["tiny:fact"], r"tasks\[0\]: unknown task 'tiny:fact'; did you mean 'tiny:facts'"),
        ([fixed(1), fixed(0)], "two are called 'evals:fixed'"),
        ([fixed(1, name="a:b"), fixed(0, name="a_b")], r"a_b\.jsonl"),
        ([fixed()], "gave no record"),
        ([fixed(math.nan)], "record 0: received id '0' and score nan"),
    ],
)
def test_refusals(policy, tasks, message):
    with pytest.raises(RecipeError, match=message):
        evals.run(policy, tasks)


def test_a_bare_model_needs_a_tokenizer(model):
    with pytest.raises(RecipeError, match="tokenizer: received none with a Qwen3ForCausalLM"):
        evals.run(model, ["tiny:facts"])


def test_ids_must_differ():
    with pytest.raises(RecipeError, match="two records have the id 'a'"):
        summarise(fixed(), [RECORDS[0], RECORDS[0]])


def test_paired():
    after = [{"id": "c", "score": 1.0}, {"id": "a", "score": 1.0}, {"id": "b", "score": 1.0}]
    found = paired(RECORDS, after)
    assert (found.n, found.gained, found.lost, found.test) == (3, 1, 0, "mcnemar")
    assert found.difference == pytest.approx(1 / 3) == pytest.approx(found.after - found.before)
    assert found.p_value == stats.mcnemar([1, 0, 1], [1, 1, 1])
    assert (found.low, found.high) == pytest.approx(stats.mean_interval([0, 1, 0]))
    with pytest.raises(DataError, match=r"of which 2 have no partner \['b', 'c'\]"):
        paired(RECORDS, after[1:2])


def test_paired_graded_scores_with_weights():
    before = [{"id": i, "score": s, "weight": w} for i, (s, w) in enumerate([(1.0, 10), (2.0, 30), (1.5, 20)])]
    after = [{**r, "score": r["score"] - 0.1 * (i + 1)} for i, r in enumerate(before)]
    found = paired(before, after)
    assert found.test == "paired_t" and found.lost == 3
    assert found.difference == pytest.approx(-(0.1 * 10 + 0.2 * 30 + 0.3 * 20) / 60)
    assert found.p_value == pytest.approx(stats.paired_t([1.0, 2.0, 1.5], [0.9, 1.8, 1.2], [10, 30, 20]))
