"""The ledger: the paper's Table 2, closed forms of paired changes, seeds, gates, and the cache of base scores."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from statewise import evals, stats
from statewise.errors import DataError, RecipeError, RunError
from statewise.evals.cache import open_cache
from statewise.evals.from_runs import arm_ledger, run_ledger, same_but_seed
from statewise.evals.gates import parse_gate, violations
from statewise.evals.ledger import Ledger, make_ledger
from statewise.evals.results import TaskResult, read_results, write_records, write_summary
from statewise.settings import Adapter, ModelSettings

# arXiv 2605.22731, Table 2: TruthfulQA of 200 and MMLU of 500 items, forgetting and retention against (0.300, 0.436).
TABLE_2 = {
    "mild SFT": (0.295, 0.444, -0.0015, 1.0008),
    "stress SFT": (0.245, 0.364, 0.0635, 0.8258),
    "OPD from mild SFT": (0.290, 0.434, 0.0060, 0.9810),
    "OPD from stress SFT": (0.275, 0.430, 0.0155, 0.9515),
    "on-policy RL": (0.290, 0.442, 0.0020, 0.9902),
}


def result(name: str, scores: Any, weights: Any = None, **fields: Any) -> TaskResult:
    plain = [{"id": str(i), "score": float(s)} for i, s in enumerate(scores)]
    records = plain if weights is None else [{**r, "weight": w} for r, w in zip(plain, weights, strict=True)]
    mean = stats.mean_se(scores, weights)[0]
    return TaskResult(name, "accuracy", len(records), mean, 0.0, 0.0, 0.0, records=tuple(records), **fields)


def binary(name: str, right: int, n: int, **fields: Any) -> TaskResult:
    return result(name, [1] * right + [0] * (n - right), **fields)


def ledger_of(base: dict[str, TaskResult], post: dict[str, TaskResult], **kwargs: Any) -> Ledger:
    return make_ledger("run", [(base, post)], **kwargs)


@pytest.mark.parametrize("row", TABLE_2)
def test_averages_of_the_papers_table(row: str) -> None:
    truthful, mmlu, forgetting, retention = TABLE_2[row]
    base = {"truthfulqa": binary("truthfulqa", 60, 200), "mmlu": binary("mmlu", 218, 500)}
    post = {
        "truthfulqa": binary("truthfulqa", round(truthful * 200), 200),
        "mmlu": binary("mmlu", round(mmlu * 500), 500),
    }
    found = ledger_of(base, post)
    assert found.forgetting.value == pytest.approx(forgetting, abs=5e-5)
    assert found.retention.value == pytest.approx(retention, abs=5e-5)
    # The ratio of means is another number.
    assert found.retention.value != pytest.approx((truthful + mmlu) / (0.3 + 0.436), abs=1e-4) or row == "mild SFT"


def test_one_change() -> None:
    base, post = [1] * 30 + [0] * 20, [1] * 20 + [0] * 10 + [1] * 3 + [0] * 17
    change = ledger_of({"a": result("a", base)}, {"a": result("a", post)}).changes[0]
    assert (change.n, change.gained, change.lost, change.test) == (50, 3, 10, "mcnemar")
    assert (change.base, change.post, change.discordant) == (0.6, 0.46, 13 / 50)
    assert change.forgetting.value == pytest.approx(0.14) and change.retention.value == pytest.approx(0.46 / 0.6)
    assert change.p_value == change.p_holm == stats.mcnemar(base, post)
    low, high = stats.bootstrap_difference(post, base, method="percentile")
    assert (change.forgetting.low, change.forgetting.high) == pytest.approx((low, high), abs=0.021)
    low, high = stats.bootstrap_ratio(base, post)
    assert (change.retention.low, change.retention.high) == pytest.approx((low, high), abs=0.03)


def test_nats_are_worse_when_they_rise_and_are_in_no_average() -> None:
    fields = {"purpose": "probe", "higher_is_better": False}
    base = {"t": result("t", [1.0, 2.0, 3.0], [10, 20, 30], **fields), "a": binary("a", 3, 6)}
    post = {"t": result("t", [1.1, 2.2, 3.1], [10, 20, 30], **fields), "a": binary("a", 3, 6)}
    found = ledger_of(base, post)
    probe = found.of("probe")[0]
    assert probe.forgetting.value == pytest.approx((0.1 * 10 + 0.2 * 20 + 0.1 * 30) / 60)
    assert math.isnan(probe.retention.value) and math.isnan(probe.p_holm) and probe.test == "paired_t"
    assert found.forgetting.value == 0.0 and found.retention.value == 1.0
    assert found.changes[1].verdict == "no change seen"


def test_holm_is_over_targets_and_retention() -> None:
    rng = np.random.default_rng(0)
    base = {name: result(name, rng.integers(2, size=80)) for name in "abc"}
    post = {
        name: result(name, rng.integers(2, size=80), purpose="target" if name == "a" else "retention") for name in "abc"
    }
    found = ledger_of(base, post)
    assert [c.p_holm for c in found.changes] == stats.holm([c.p_value for c in found.changes])
    assert "Holm over 3 tasks" in found.method and "exact McNemar" in found.method
    assert [c.task for c in found.of("target")] == ["a"]
    assert [c.task for c in ledger_of(base, post, purposes={"a": "retention", "b": "target"}).of("target")] == ["b"]


def test_a_base_of_zero_has_no_ratio() -> None:
    base, post = {"a": binary("a", 0, 9), "b": binary("b", 4, 8)}, {"a": binary("a", 1, 9), "b": binary("b", 2, 8)}
    found = ledger_of(base, post)
    assert math.isnan(found.changes[0].retention.value) and found.retention.value == 0.5
    assert found.forgetting.value == pytest.approx((-1 / 9 + 0.25) / 2)
    assert json.loads(json.dumps(found.to_plain()))["seeds"] == 1


def test_seeds_are_taken_together() -> None:
    rng = np.random.default_rng(1)
    base = rng.integers(2, size=200)
    posts = [np.where(rng.random(200) < 0.2, 0, base) for _ in range(4)]
    pairs = [({"a": result("a", base)}, {"a": result("a", post)}) for post in posts]
    found = make_ledger("arm", pairs)
    change = found.changes[0]
    assert (found.seeds, change.seeds, change.n, change.test) == (4, 4, 200, "bootstrap")
    gaps = [base - post for post in posts]
    assert change.forgetting.value == pytest.approx(np.mean(gaps))
    low, high = stats.bootstrap_seeds(gaps, crossed=True)
    assert (change.forgetting.low, change.forgetting.high) == pytest.approx((low, high), abs=0.01)
    assert change.p_value < 0.01 and "4 seeds, then examples" in found.method
    same = make_ledger("arm", [({"a": result("a", base)}, {"a": result("a", base)})] * 3)
    assert same.changes[0].p_value == 1.0 and same.changes[0].forgetting.low == 0.0


def test_refusals() -> None:
    with pytest.raises(DataError, match=r"task 'a': received 3 and 4 examples, of which 1 have no partner \['3'\]"):
        ledger_of({"a": binary("a", 1, 3)}, {"a": binary("a", 1, 4)})
    with pytest.raises(DataError, match=r"no task was evaluated both before \(a\) and after"):
        ledger_of({"a": binary("a", 1, 3)}, {"b": binary("b", 1, 3)})
    with pytest.raises(DataError, match="holds no records"):
        ledger_of({"a": binary("a", 1, 3)}, {"a": TaskResult("a", "accuracy", 3, 0.3, 0, 0, 1)})


def test_gates() -> None:
    base = {"keep": binary("keep", 80, 100), "aim": binary("aim", 20, 100, purpose="target")}
    post = {"keep": binary("keep", 75, 100), "aim": binary("aim", 50, 100, purpose="target")}
    ledger = ledger_of(base, post)

    def broken(text: str, bound: Any = "point") -> list[str]:
        return violations(ledger, [parse_gate(text)], bound)

    assert broken("max_drop=0.04")[0].startswith("run: max_drop=0.04: forgetting of a retention task keep is 0.05 [")
    assert broken("max_drop=0.05") == [] and broken("max_mean_drop=0.04") and broken("min_retention=0.95")
    assert broken("min_gain=0.3") == [] and broken("min_gain=0.31")
    assert broken("max_drop=0.04", "surely") == [] and broken("max_drop=0.05", "possibly")
    assert broken("min_gain=0.25", "possibly") and broken("min_gain=0.35", "surely") == []
    assert "nothing to hold against it" in broken("max_probe_rise=1")[0]
    with pytest.raises(RecipeError, match="did you mean 'max_drop'"):
        parse_gate("max_drp=0.1")
    for wrong in ("max_drop", "max_drop=x", "max_drop=nan"):
        with pytest.raises(RecipeError, match=r"expected a number such as max_drop=0\.02"):
            parse_gate(wrong)


TASKS = [{"kind": "tiny:facts", "count": 5}, {"kind": "tiny:math", "count": 3, "max_new_tokens": 4}]


def test_results_survive_the_disk(policy: Any, tmp_path: Path) -> None:
    results = evals.run(policy, TASKS, out=tmp_path)
    again = read_results(tmp_path)
    assert list(again) == list(results)
    for name, found in results.items():
        assert again[name].summary() == found.summary()
        assert [r["score"] for r in again[name].records] == [r["score"] for r in found.records]
    assert again["tiny:math"].purpose == "target" and again["tiny:facts"].purpose == "retention"
    (tmp_path / "tiny_math.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(DataError, match=r"tiny_math\.jsonl:1: is no record with id and score"):
        read_results(tmp_path)
    with pytest.raises(DataError, match="can't be read as an evaluation"):
        read_results(tmp_path / "nowhere")


@pytest.fixture
def saved(policy: Any, tmp_path: Path) -> Path:
    policy.model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_base_scores_are_measured_once(
    policy: Any, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATEWISE_CACHE", str(tmp_path / "cache"))

    def opened(**changes: Any) -> Any:
        return open_cache(ModelSettings(path=str(saved), **changes), device="cpu", batch_tokens=100)

    first = evals.run(policy, TASKS, cache=opened())
    assert len(list((tmp_path / "cache/evals").iterdir())) == 2
    monkeypatch.setattr(evals, "summarise", None)  # measuring again would fail
    again = evals.run(policy, TASKS, cache=opened(), seed=5, out=tmp_path / "out")
    assert {n: r.summary() for n, r in again.items()} == {n: r.summary() for n, r in first.items()}
    assert read_results(tmp_path / "out")["tiny:math"].mean == first["tiny:math"].mean
    fresh_adapter = opened(adapter=Adapter(rank=2))
    assert fresh_adapter.facts == opened().facts and opened(dtype="bfloat16").facts != opened().facts
    for changed in ({"count": 4}, {"normalize": "token"}, {"name": "other"}):
        with pytest.raises(TypeError):
            evals.run(policy, [{**TASKS[0], **changed}], cache=opened())
    (saved / "config.json").write_text((saved / "config.json").read_text() + " ")
    with pytest.raises(TypeError):
        evals.run(policy, TASKS, cache=opened())
    monkeypatch.setenv("STATEWISE_CACHE", "off")
    assert opened() is None


def test_what_decides_a_cached_score(policy: Any, saved: Path, tmp_path: Path, write: Any) -> None:
    from statewise.component import parse

    cache = open_cache(ModelSettings(path=str(saved)), device="cpu", batch_tokens=100)
    file = write("rows.jsonl", [{"prompt": "a", "answer": "1"}])

    def key(seed: int = 0, limit: int | None = None, **settings: Any) -> Any:
        task: Any = parse("task", {"kind": "generative", "data": file, **settings}, "task")
        return cache.key(task, seed=seed, limit=limit, base_dir=tmp_path)

    assert key() == key(seed=1) and key(limit=3) != key()
    assert key(temperature=1.0) != key(temperature=1.0, seed=1)
    before = key()
    write("rows.jsonl", [{"prompt": "b", "answer": "1"}])
    assert key() != before and key(data="someone/on_the_hub") is None
    assert open_cache(ModelSettings(path="someone/on_the_hub"), device="cpu", batch_tokens=1) is None


def made_run(path: Path, seed: int, post: int, *, lr: float = 0.1) -> Path:
    """A run directory with evaluations of steps 0 and 5 of 40 examples, 20 of them right before."""
    from statewise.recipe import Recipe
    from statewise.run import RunDir

    plain = {"source": {"kind": "dataset", "data": "tiny:math"}, "signal": ["gold"], "objective": ["nll"]}
    recipe = Recipe.from_plain({**plain, "budget": {"max_steps": 5}, "seed": seed, "optim": {"lr": lr}})
    run = RunDir.create(path, recipe)
    for step, right in ((0, 20), (5, post)):
        run.eval_dir(step).mkdir(parents=True)
        results = {"keep": binary("keep", right, 40)}
        write_records(run.eval_dir(step), results["keep"])
        write_summary(run.eval_dir(step), results, {})
    return path


def test_runs(tmp_path: Path) -> None:
    a, b, c = (
        made_run(tmp_path / n, s, p, lr=r) for n, s, p, r in [("a", 0, 16, 0.1), ("b", 1, 12, 0.1), ("c", 0, 20, 0.2)]
    )
    assert run_ledger(a).forgetting.value == pytest.approx(0.1)
    assert same_but_seed([a, c, b]) == [[a, b], [c]]
    assert arm_ledger("arm", [a, b]).forgetting.value == pytest.approx(0.15)
    assert run_ledger(a, base=b).forgetting.value == pytest.approx(0.1)
    assert run_ledger(c, base=a / "evals/step_000005").forgetting.value == pytest.approx(-0.1)
    with pytest.raises(RunError, match="has no evaluation of step 3; it has 5"):
        run_ledger(a, step=3)
    (a / "evals/step_000000").rename(tmp_path / "gone")
    with pytest.raises(RunError, match="no evaluation of step 0"):
        run_ledger(a)
    (a / "evals/step_000005").rename(tmp_path / "gone5")
    with pytest.raises(RunError, match="no evaluation after step 0"):
        run_ledger(a, base=b)
    with pytest.raises(RunError, match="no run directory"):
        same_but_seed([tmp_path])


def test_evaluations_made_later_and_runs_that_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from statewise.cli import main

    def call(*words: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(w) for w in words])
        return (int(caught.value.code or 0), *capsys.readouterr())

    run = made_run(tmp_path / "run", 0, 16)
    base, after = run / "evals/step_000000", run / "evals/step_000005"
    code, out, _ = call("ledger", after, "--base", base)
    assert code == 0 and "mean forgetting +0.1000" in out
    assert "holds one evaluation" in call("ledger", after)[2]
    failed = made_run(tmp_path / "failed", 0, 16, lr=0.3)
    (failed / "evals/step_000005").rename(tmp_path / "gone")
    code, out, err = call("ledger", run, failed)
    assert code == 0 and "mean forgetting" in out and f"left out: {failed}" in err
    assert call("ledger", failed)[0] == 2 and call("ledger", run, failed, "--gate", "max_drop=0.5")[0] == 2
    probe = make_ledger("x", [({"t": binary("t", 5, 9)}, {"t": binary("t", 5, 9)})], {"t": "probe"})
    assert "Holm" not in probe.method
    with pytest.raises(DataError, match=r"before \(a\) and after training \(b\)"):
        make_ledger("x", [({"a": binary("a", 5, 9)}, {"b": binary("b", 5, 9)})])


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from statewise.cli import main

    a, b = made_run(tmp_path / "a", 0, 16), made_run(tmp_path / "b", 1, 12)

    def call(*words: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(w) for w in words])
        return (int(caught.value.code or 0), *capsys.readouterr())

    code, out, _ = call("ledger", a, b)
    assert code == 0 and "1 more seed" in out and "40 x 2" in out and "mean forgetting +0.1500" in out
    assert "seed" in call("ledger", a, a)[2] and "is there more than once" in call("ledger", a, a)[2]
    code, out, err = call("ledger", a, b, "--apart", "--gate", "max_drop=0.15", "--json")
    told = json.loads(out)
    assert code == 1 and len(told["ledgers"]) == 2 and len(told["violations"]) == 1 and "a gate is broken" in err
    assert call("ledger", a, "--gate", "max_drop=0.2")[0] == 0
    assert "target" in call("ledger", a, "--target", "keep")[1]
    assert "'nothing': was not evaluated; there are: keep" in call("ledger", a, "--target", "nothing")[2]
    assert "expected one of point" in call("ledger", a, "--gate-bound", "low")[2]
    code, out, _ = call("power", "--delta", "0.03", "--run-a", a, "--json")
    row = json.loads(out)["comparisons"][0]
    assert (row["n"], row["discordant"], row["items"]) == (40, 0.1, stats.mcnemar_items(0.03, 0.1))
    assert (
        json.loads(call("power", "--delta", "0.03", "--discordant", "0.25", "--json")[1])["comparisons"][0]["items"]
        == 2238
    )
    meaning, _, columns, *rows = call("power", "--delta", "0.2")[1].splitlines()
    assert meaning.startswith("items: how many a paired comparison needs to see a difference of 0.2 with 80% power")
    assert "discordant: share of items" in meaning and "smallest" not in meaning
    assert columns.split() == ["discordant", "items"] and rows[1].split()[0] == "0.25"
    assert "smallest seen: the least" in call("power", "--delta", "0.03", "--run-a", a)[1].splitlines()[0]
    assert (
        call("power", "--delta", "0")[0] == 2 and "without --run-a" in call("power", "--delta", "0.1", "--run-b", a)[2]
    )
