"""Drift measures beside retention."""

import json
from typing import Any

import pytest
from tests.report.conftest import Runs

from statewise.report import drift
from statewise.report.model import Question, build
from statewise.report.reading import grouped


def row(arm: str, kept: float, **measures: float) -> dict[str, Any]:
    return {"arm": arm, "seed": 0, "kept": kept, "measures": measures}


def test_measures_are_ranked_by_their_correlation() -> None:
    rows = [row(f"a{i}", 1 - i / 10, kl=float(i), mmd=float(i % 2), partial=1.0) for i in range(5)]
    ranked = drift.ranked(rows)
    assert [r["measure"] for r in ranked] == ["kl", "mmd", "partial"]
    assert ranked[0]["rho"]["value"] == pytest.approx(-1)
    assert ranked[0]["rho"]["high"] < 0
    assert ranked[1]["rho"]["value"] == pytest.approx(0, abs=1e-9)
    assert ranked[2]["rho"]["value"] != ranked[2]["rho"]["value"]  # constant: undefined
    assert ranked[0]["means"]["a3"] == 3.0


def test_few_runs_are_not_ranked() -> None:
    (ranked,) = drift.ranked([row("a", 0.9, kl=1.0), row("b", 0.8, kl=2.0)])
    assert ranked["rho"]["value"] != ranked["rho"]["value"]


def test_runs_with_drift_are_shown(runs: Runs) -> None:
    for index, run in enumerate(runs):
        (run / "diagnostics").mkdir()
        (run / "diagnostics" / "drift.json").write_text(json.dumps({"measures": {"kl": 0.1 * index}, "features": {}}))
    model = build(grouped(runs), Question("t"))
    assert [r["measures"]["kl"] for r in model.drift] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert model.drift_ranks[0]["runs"] == 4
    assert model.tables == {}
    stress = [r["kept"] for r in model.drift if r["arm"] == "stress"]
    assert stress == [seed["kept"]["facts"] for r in model.arms if r["arm"] == "stress" for seed in r["by_seed"]]


def test_metrics_of_weights_and_scores_on_the_way_are_curves(runs: Runs) -> None:
    rows = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    rows = [{**r, "geometry/stable_rank": 2.0 + r["step"]} for r in rows]
    rows += [{"step": step, "eval/math": 0.5, "eval/math/low": 0.4} for step in (0, 2, 5)]
    (runs[0] / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    curves = build(grouped(runs), Question("t")).curves
    assert list(curves) == ["loss", "phi", "geometry/stable_rank", "eval/math"]
    assert curves["eval/math"][0]["x"] == [0, 200, 500]
