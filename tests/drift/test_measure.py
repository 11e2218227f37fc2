"""The whole measurement: two policies, runs, files, the ranking and the command."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from statewise.cli import main
from statewise.drift.measure import DriftSettings, measure_drift
from statewise.drift.ranking import Point, Studied, points, rank
from statewise.drift.runs import RunDrift, first_model, read
from statewise.drift.states import fixed_prompts
from statewise.errors import DataError, RecipeError, RunError
from statewise.run import RunDir

SETTINGS = DriftSettings(rollouts=2, positions=3, max_tokens=10, permutations=49, projections=16)
PROMPTS = [{"data": "tiny:math", "count": 5, "split": "test"}, {"data": "tiny:facts", "count": 4, "split": "test"}]


def test_two_policies(policy: Any, moved: Any) -> None:
    prompts = fixed_prompts(policy, PROMPTS)
    drift = measure_drift(policy, moved, prompts, SETTINGS)
    told = drift.result
    for name in ("lexical", "hidden"):
        found = told["features"][name]
        assert found["states"] == [54, 54] and len(found["mmd_grid"]) == 5
        assert set(found["by_source"]) == {"tiny:math", "tiny:facts"} and set(found["by_position"]) == {"0", "1", "2"}
        assert found["by_source"]["tiny:math"]["mmd"]["bandwidth"] == found["mmd"]["bandwidth"]
    assert told["kl"]["own_states"]["kl_ba"] > 0 and told["kl"]["before_states"]["kl_ab"] > 0
    assert drift.measures["kl_ba_own_states"] == told["kl"]["own_states"]["kl_ba"]
    assert drift.measures["lexical_mmd2"] == told["features"]["lexical"]["mmd"]["mmd2_biased"]
    assert json.dumps(told) == json.dumps(measure_drift(policy, moved, prompts, SETTINGS).result), "the same twice"


def test_a_policy_and_itself(policy: Any) -> None:
    """Sampled independently: distances are noise, KL is nothing."""
    told = measure_drift(policy, policy, fixed_prompts(policy, PROMPTS), SETTINGS).result
    assert told["kl"]["own_states"]["kl_ab"] == 0.0 and told["features"]["hidden"]["mmd"]["p"] > 0.02
    assert 0 < told["features"]["lexical"]["mmd"]["mmd2_biased"] <= 2 * told["features"]["lexical"]["mmd"]["null_q95"]


def test_refusals(policy: Any) -> None:
    with pytest.raises(RecipeError, match="received no prompt"):
        measure_drift(policy, policy, [])
    with pytest.raises(RecipeError, match="unknown features 'words'"):
        measure_drift(policy, policy, fixed_prompts(policy, PROMPTS), DriftSettings(max_tokens=2, features=("words",)))


def test_runs_and_their_ranking(runs: dict[str, RunDir]) -> None:
    measurer = RunDrift(PROMPTS, SETTINGS, limit=6, rollouts=4)
    for run in runs.values():
        measurer.measure(run.path)
    stress, mild = (read(runs[name].path) for name in ("stress0", "mild0"))
    assert stress is not None and mild is not None
    for name in ("kl_ab_retention_answer", "kl_ba_own_states", "kl_ab_training"):
        assert stress["measures"][name] > 10 * mild["measures"][name]
    assert mild["training_states"] == 4 and mild["reachability"]["tokens"] > 40
    assert mild["reachability"]["logprob"] == pytest.approx(stress["reachability"]["logprob"]), "of the same base"
    opd = read(runs["opd0"].path)
    assert opd is not None and opd["reachability"]["prefix_logprob"] < 0
    table = pyarrow.parquet.read_table(runs["mild0"].path / "diagnostics/drift_states.parquet")
    assert {"where", "source", "id", "t", "kl_ab", "kl_ba", "prefix_logprob_a"} <= set(table.column_names)
    found = points([Studied(name[:-1], run.path) for name, run in runs.items()])
    assert len(found) == 4 and "rise_of_probe" in found[0].measures
    ranked = rank(found, resamples=100)
    assert {r.measure for r in ranked} >= {"lexical_mmd2", "hidden_mmd2", "jaccard", "training_phi", "rise_of_probe"}
    assert (ranked[0].runs, ranked[0].arms) == (4, 3)


def test_a_measure_that_ranks_is_found() -> None:
    found = [
        Point(
            f"{arm}{seed}",
            arm,
            forgetting=i + 0.1 * seed,
            measures={"good": i * i + seed * 0.1, "bad": (i * 7 + seed) % 5},
        )
        for i, arm in enumerate("abcdefgh")
        for seed in range(3)
    ]
    ranked = {r.measure: r for r in rank(found, resamples=500)}
    assert (
        ranked["good"].rho > 0.95 and ranked["good"].verdict == "ranks forgetting" and ranked["good"].rho_of_arms == 1.0
    )
    assert ranked["bad"].verdict == "not shown to rank" and list(ranked) == ["good", "bad"]
    assert rank([]) == []


def test_a_correlation_that_one_arm_makes_is_shown() -> None:
    found = [
        Point(
            f"{arm}{seed}", arm, 1.0 if arm == "z" else 0.01 * seed, {"lone": 9.0 if arm == "z" else 0.1 * (-seed) ** i}
        )
        for i, arm in enumerate("abcz")
        for seed in range(1, 4)
    ]
    lone = rank(found, resamples=20)[0]
    assert lone.rho > 0.5 > abs(lone.rho_without_worst)


def test_another_vocabulary_is_refused(policy: Any) -> None:
    from statewise.drift.runs import load

    with pytest.raises(RecipeError, match="base' has other tokens than"):
        measure_drift(policy, load("tiny"), fixed_prompts(policy, PROMPTS), SETTINGS)


def test_the_runs_of_a_study(runs: dict[str, RunDir]) -> None:
    """Arms by name, against the study's own base evaluation, with its retention tasks."""
    from statewise.cli.drift import _runs_at

    root = runs["mild0"].path.parent
    rows = [
        {"arm": name[:-1], "seed": int(name[-1]), "run": name, "base": "mild1", "own_budget": False} for name in runs
    ]
    (root / "plan.json").write_text(json.dumps({"runs": rows, "target": "probe", "retention": ["tiny:facts"]}))
    try:
        found = _runs_at(root)
    finally:
        (root / "plan.json").unlink()
    assert [f.arm for f in found] == ["mild", "mild", "stress", "opd"]
    assert found[2].base == root / "mild1" and found[2].purposes["tiny:facts"] == "retention"
    assert found[2].model.path == runs["mild0"].recipe().model.path


def test_what_is_missing_is_said(runs: dict[str, RunDir], tmp_path: Path) -> None:
    fresh = RunDir.create(tmp_path / "fresh", runs["mild0"].recipe())
    with pytest.raises(RunError, match="has no checkpoint"):
        RunDrift(PROMPTS, SETTINGS).measure(fresh.path)
    with pytest.raises(DataError, match="has no drift measured"):
        points([Studied("a", fresh.path)])
    child = runs["mild0"].recipe(["optim.lr=1e-3", f"model.path={runs['mild0'].path}"])
    later = RunDir.create(tmp_path / "later", child)
    assert first_model(later.path) == runs["mild0"].recipe().model


def test_command(runs: dict[str, RunDir], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def call(*words: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(w) for w in words])
        return (int(caught.value.code or 0), *capsys.readouterr())

    small = ["--prompts", "tiny:math:count=4", "--max-tokens", "8", "--permutations", "19", "--limit", "4"]
    code, out, _ = call("drift", runs["stress0"].path, *small, "--features", "lexical")
    assert code == 0 and "(median rule)" in out and "retention answer" in out and "training states under A" in out
    base = runs["mild0"].recipe().model.path
    code, out, _ = call("drift", base, runs["mild0"].path, *small, "--json", "--out", tmp_path / "out")
    assert code == 0 and json.loads(out)["features"]["hidden"]["mmd"]["p"] > 0
    assert json.loads((tmp_path / "out/drift.json").read_text())["b"] == str(runs["mild0"].path)
    code, out, err = call("drift", "--study", runs["mild0"].path.parent, *small, "--out", tmp_path / "ranked")
    assert code == 0 and "4 runs of 3 methods" in out and "Spearman" in out, err
    assert len(json.loads((tmp_path / "ranked/drift_ranking.json").read_text())["runs"]) == 4
    assert "at least three" in call("drift", "--study", runs["mild0"].path, *small)[2]
    assert "which is no run" in call("drift", "tiny", *small)[2]
    assert "received 3 policies" in call("drift", "tiny", "tiny", "tiny", *small)[2]
    assert "received 'words'" in call("drift", "tiny", "tiny", "--features", "words")[2]
