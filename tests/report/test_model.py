"""The report's plain data: a golden copy, and what each part must say."""

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.report.conftest import ARMS, HOSTILE, Runs, edit, write_evaluation, write_run

from statewise.errors import DataError, RunError
from statewise.estimates import few_seeds
from statewise.evals.from_runs import arm_ledger, read_base
from statewise.report import report
from statewise.report.answer import sentences
from statewise.report.model import Question, ReportModel, build
from statewise.report.names import shortest_names
from statewise.report.reading import Planned, grouped, read_run
from statewise.report.scores import Scores

GOLDEN = Path(__file__).parent / "golden" / "model.json"


def model_of(runs: Runs, **fields: Any) -> ReportModel:
    return build(grouped(runs), Question("title", **fields))


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def test_golden(runs: Runs) -> None:
    """STATEWISE_UPDATE_GOLDEN=1 writes the copy anew."""
    model = rounded(model_of(runs, about="about", versus="stress").to_plain())
    if os.environ.get("STATEWISE_UPDATE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps(model, indent=1) + "\n")
    assert model == json.loads(GOLDEN.read_text())


def test_the_answer(runs: Runs) -> None:
    answer = model_of(runs, versus="stress").answer
    assert answer[0].startswith("mild gained most on math: 0.")
    assert "It kept" in answer[0]
    assert any(text.startswith("Forgot significantly: stress (facts -0.") for text in answer)
    assert any(text.startswith("Better than stress on math: mild +0.") for text in answer)
    assert any(text.startswith("Not significant against base") and "facts: mild" in text for text in answer)


def test_a_single_run_is_answered_for(runs: Runs) -> None:
    answer = model_of(runs[:1]).answer
    assert answer[0].startswith(("mild gained on math", "mild: the change on math"))
    assert answer[-1].startswith("One seed an arm: intervals are over examples alone")


def test_few_seeds_are_told_by_arm() -> None:
    assert few_seeds({"a": 5, "b": 7}) is None
    assert str(few_seeds({"a": 3, "b": 2})).startswith("Fewer than 5 seeds: how runs differ")
    assert str(few_seeds({"a": 5, "b": 1})).startswith("Fewer than 5 seeds (b): how runs differ")
    assert str(few_seeds({"a": 1, "b": 1})).startswith("One seed an arm")


def test_an_answer_names_a_task_where_runs_share_no_target(runs: Runs) -> None:
    difference = {"value": -0.15, "low": -0.35, "high": 0.05}
    row = {
        "arm": "first",
        "against": "base",
        "task": "sums",
        "purpose": "target",
        "before": 0.45,
        "after": 0.3,
        "n": 20,
    }
    row |= {"seeds": 1, "difference": difference, "verdict": "not significant"}
    table = Scores(None, None, {}, [{"arm": "first", "retention": None}], [row], "")
    assert sentences(table)[0].startswith("first: the change on sums is not significant: 0.450 to 0.300")


def test_tasks_are_those_of_all_runs(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", "plain", 0, {"probe": 0.4})
    second = write_run(tmp_path / "b", "mild", 0, {"math": 0.9, "facts": 0.9, "probe": 0.4})
    summary = first / "evals" / "step_000000" / "summary.json"
    summary.write_text(json.dumps({"tasks": {"probe": json.loads(summary.read_text())["tasks"]["probe"]}}))
    assert model_of([first, second]).answer[0].startswith("mild gained on math: 0.")
    assert "Target against retention" in report([first, second], tmp_path / "page.html").read_text()


def test_without_a_base_there_is_no_answer(runs: Runs) -> None:
    import shutil

    for run in runs:
        shutil.rmtree(run / "evals" / "step_000000")
    model = model_of(runs)
    assert "nothing to compare" in model.answer[0]
    assert model.contrasts == []
    assert [row["arm"] for row in model.arms] == ["mild", "stress"]


def test_no_significant_gain_is_said(tmp_path: Path) -> None:
    means = {"math": 0.5, "facts": 0.9, "probe": 0.4}
    run = write_run(tmp_path / "same", "same", 0, means, n=30)
    other = write_run(tmp_path / "other", "other", 0, means, n=30)
    answer = model_of([run, other]).answer
    assert answer[0].startswith("No arm gained significantly on math; the best is")
    assert answer[1] == "No significant forgetting was seen on any retention task."


def test_an_interval_that_excludes_0_and_is_not_significant_is_explained() -> None:
    from statewise.report.answer import _alone

    row = {"difference": {"value": 0.077, "low": 0.005, "high": 0.152}, "p_holm": 0.355}
    assert "excludes 0; adjusted for all comparisons p = 0.35" in _alone(row)
    assert _alone({**row, "difference": {**row["difference"], "low": -0.005}}) == ""
    assert _alone({**row, "p_holm": None}) == ""


def test_holm_is_over_all_comparisons_with_one_opponent(runs: Runs) -> None:
    from statewise.stats.hypothesis import holm

    rows = [row for row in model_of(runs).contrasts if row["purpose"] != "probe"]
    assert len(rows) == 4
    assert [row["p_holm"] for row in rows] == holm([row["p"] for row in rows])
    assert all(row["p_holm"] is None for row in model_of(runs).contrasts if row["purpose"] == "probe")


def test_seeds_share_an_arm_and_other_recipes_do_not(runs: Runs) -> None:
    assert [view.name for view in grouped(runs)] == ["mild, seed 0", "mild, seed 1", "stress, seed 0", "stress, seed 1"]
    (runs[1] / "recipe.toml").write_text("seed = 1\nlr = 5")
    assert [view.arm for view in grouped(runs)] == ["mild0", "mild1", "stress", "stress"]


def test_a_base_is_taken_from_a_run_of_the_same_model(runs: Runs) -> None:
    import shutil

    shutil.rmtree(runs[2] / "evals" / "step_000000")
    views = grouped(runs)
    assert views[2].base is not None
    (runs[2] / "recipe.toml").write_text('source = "stress"\nmodel = { path = "other" }')
    assert grouped(runs)[2].base is None


def test_failures_and_alarms_are_shown(runs: Runs) -> None:
    edit(runs[0], status="failed", error="NonFiniteLoss: nan")
    edit(runs[2], warnings=["rewards are all 0"])
    edit(runs[3], warnings=["rewards are all 0"])
    views = [*grouped(runs), Planned("later", 3)]
    assert build(views, Question("t", warnings=("budgets differ",))).warnings == [
        "mild, seed 0: failed: NonFiniteLoss: nan",
        "stress, seeds 0, 1: rewards are all 0",
        "later, seed 3: not run yet.",
        "budgets differ",
    ]


def test_a_repeated_seed_is_said_to_be_no_evidence(runs: Runs) -> None:
    (warning,) = build(grouped([*runs, runs[0], runs[0]]), Question("t")).warnings
    assert warning.startswith("mild: seed 0 is there 3 times; a repeated seed is no new evidence")


def test_paths_of_teachers_are_told_as_runs(runs: Runs) -> None:
    (runs[0] / "recipe.toml").write_text(f'source = "mild"\nteacher = "{runs[2]}"')
    edit(runs[0], method=[f"signal: teacher({runs[2]})"])
    model = model_of(runs)
    assert str(runs[2].parent) not in json.dumps(model.to_plain())
    assert {
        "setting": "teacher",
        "values": {"mild0": "stress", "mild1": None, "stress": None},
    } in model.differences


def test_changed_answers_come_first_and_arms_take_turns(runs: Runs) -> None:
    rows = model_of(runs).completions
    assert [row["arm"] for row in rows[:4]] == ["mild", "stress", "mild", "stress"]
    changed = [row["scores"][0] != row["scores"][1] for row in rows if row["arm"] == "mild"]
    assert changed == sorted(changed, reverse=True)
    assert any(row["before"] == HOSTILE for row in rows)


def test_diagnostics_are_tables(runs: Runs) -> None:
    (runs[0] / "diagnostics").mkdir()
    (runs[0] / "diagnostics" / "drift.jsonl").write_text('{"mmd": 0.1}\n{"mmd": 0.2}\n')
    (runs[2] / "diagnostics").mkdir()
    (runs[2] / "diagnostics" / "drift.json").write_text('{"rows": [{"mmd": 0.3}]}')
    rows = model_of(runs).tables["drift"]
    assert [(row["arm"], row["mmd"]) for row in rows] == [("mild", 0.1), ("mild", 0.2), ("stress", 0.3)]
    (runs[0] / "diagnostics" / "drift.jsonl").write_text("{")
    with pytest.raises(RunError, match=r"drift.jsonl: can't be read"):
        grouped(runs)


def test_other_examples_are_refused(runs: Runs, tmp_path: Path) -> None:
    short = write_run(tmp_path / "short", "short", 0, ARMS["mild"], n=10)
    with pytest.raises(DataError, match="no partner"):
        build([read_run(short, base=runs[0])], Question("t"))


def test_curves_are_thinned(tmp_path: Path) -> None:
    run = write_run(tmp_path / "long", "long", 0, ARMS["mild"], steps=1001)
    (curve,) = model_of([run]).curves["loss"]
    assert len(curve["x"]) == len(curve["y"]) == 167
    assert curve["x"][-1] == 100_100


def test_the_same_runs_give_the_same_bytes(runs: Runs, tmp_path: Path) -> None:
    one, two = report(runs, tmp_path / "one.html"), report(runs, tmp_path / "two.html")
    assert one.read_bytes() == two.read_bytes()


def test_thirty_runs_take_under_five_seconds_and_no_torch(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / f"{arm}{seed}", f"arm{arm}", seed, ARMS["mild"], n=400, steps=250)
        for arm in range(10)
        for seed in range(3)
    ]
    code = (
        "import sys; from statewise.report import report\n"
        f"report({[str(p) for p in paths]!r}, {str(tmp_path / 'r.html')!r}, versus='arm0')\n"
        "assert 'torch' not in sys.modules and 'plotly' not in sys.modules"
    )
    before = os.times().children_user
    subprocess.run([sys.executable, "-c", code], check=True)
    assert os.times().children_user - before < 5


def test_names_are_the_shortest_that_tell_apart() -> None:
    first, second = Path("a/x/sft"), Path("b/x/sft")
    assert shortest_names([("sft", first), ("idft", second)]) == ["sft", "idft"]
    assert shortest_names([("sft", Path("a/one")), ("sft", Path("a/two")), ("idft", first)]) == ["one", "two", "idft"]
    assert shortest_names([("sft", first), ("sft", second)]) == ["a/x/sft", "b/x/sft"]
    assert shortest_names([("sft", Path("a/idft")), ("sft", Path("a/two")), ("idft", first)])[0] == "a/idft"
    assert shortest_names([("sft", Path("a/full")), (None, Path("evals/full"))]) == ["sft", "full"]


def test_directories_of_eval_are_read_as_the_ledger_reads_them(runs: Runs, tmp_path: Path) -> None:
    later = tmp_path / "later"
    write_evaluation(later, {"math": 0.95, "facts": 0.9}, 40, Random(5))
    model = build(grouped([runs[2], later], base=runs[0]), Question("t", versus="stress"))
    post = arm_ledger("later", [later], base=runs[0]).changes[0].post
    assert [row["after"] for row in model.contrasts if row["arm"] == "later" and row["task"] == "math"] == [post, post]
    assert [row["arm"] for row in model.budgets] == ["stress"] and model.differences == []
    assert model.evaluated == f"Scores are of the evaluation later: {later}."
    assert str(later) in report([runs[2], later], tmp_path / "page.html").read_text()
    base = tmp_path / "base"
    write_evaluation(base, {"math": 0.1, "facts": 0.9}, 40, Random(5))
    assert {view.base["math"].mean for view in grouped([runs[2], later], base)} == {read_base(base)["math"].mean}
    with pytest.raises(RunError, match="no evaluation of step 0"):
        (runs[0] / "evals" / "step_000000" / "summary.json").unlink()
        grouped(runs, base=runs[0])


def test_the_last_of_several_evaluations_is_named(runs: Runs) -> None:
    write_evaluation(runs[0] / "evals" / "step_000003", ARMS["stress"], 40, Random(1))
    (runs[0] / "evals" / "step_000009").mkdir()  # was not done to the end
    assert model_of(runs[:1]).evaluated == "Scores are of the evaluation mild: step 5 (not 3)."
    assert model_of(runs[2:]).evaluated == ""
