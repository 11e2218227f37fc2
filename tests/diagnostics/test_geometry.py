"""Numbers of a running training: right, cheap enough, the same after a resume, for LoRA, ranks and shards."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.training.conftest import model_dir, plain  # noqa: F401 - fixtures
from tests.training.test_distributed import _shard_on_cpu, run_on
from tests.training.test_loop import _killed, run_in_child

from statewise import train
from statewise.component import Diagnostic
from statewise.diagnostics import live
from statewise.diagnostics.live import Watch, differs, leading_values
from statewise.errors import RecipeError
from statewise.recipe import Recipe
from statewise.run import RunDir

LAST = 6


def watched(run: RunDir) -> dict[int, dict[str, float]]:
    prefix = "geometry/"
    rows = [
        (r["step"], {k.removeprefix(prefix): v for k, v in r.items() if k.startswith(prefix)}) for r in run.metrics()
    ]
    return {step: row for step, row in rows if row}


@pytest.fixture
def recipe(plain: dict[str, Any]) -> Recipe:  # noqa: F811
    return Recipe.from_plain({**plain, "diagnostics": [{"kind": "geometry", "every": 3, "k": 4}]}, name="small")


def test_numbers_are_those_of_the_checkpoint(recipe: Recipe, model_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    run = train(recipe, tmp_path / "run", quiet=True)
    found = watched(run)
    assert list(found) == [3, 6]
    before, after = load_file(model_dir / "model.safetensors"), load_file(run.checkpoints()[LAST] / "model.safetensors")
    names = [name for name in before if name.endswith("_proj.weight")]
    changes = {name: (after[name].double() - before[name].double()) for name in names}
    spectra = [torch.linalg.svdvals(d).numpy() for d in changes.values()]
    row = found[LAST]
    total = sum((s**2).sum() for s in spectra)
    assert row["frobenius"] == pytest.approx(np.mean([np.linalg.norm(s) for s in spectra]), rel=1e-5)
    assert row["relative_norm"] == pytest.approx(
        (total / sum(float(before[n].double().square().sum()) for n in names)) ** 0.5
    )
    assert row["stable_rank"] == pytest.approx(np.mean([(s**2).sum() / s[0] ** 2 for s in spectra]), rel=1e-5)
    assert row["top4_energy"] == pytest.approx(np.mean([(s[:4] ** 2).sum() / (s**2).sum() for s in spectra]), rel=1e-5)
    assert row["hill4"] == pytest.approx(np.mean([1 / np.log(s[:3] / s[3]).mean() for s in spectra]), rel=1e-4)
    same = sum(int((before[n].bfloat16() == after[n].bfloat16()).sum()) for n in names)
    assert row["unchanged_share"] == pytest.approx(same / sum(before[n].numel() for n in names))
    assert 0 < row["visible_share"] < 1


def test_a_table_and_a_page_are_left(recipe: Recipe, tmp_path: Path) -> None:
    run = train(recipe, tmp_path / "run", quiet=True)
    rows = json.loads((run.path / "diagnostics" / "geometry.json").read_text())
    assert [row["step"] for row in rows] == [3, 6] and rows[0]["stable_rank"] == watched(run)[3]["stable_rank"]
    assert "stable rank of D" in (run.path / "diagnostics" / "geometry.html").read_text(encoding="utf-8")


def test_what_one_step_shows_in_bf16() -> None:
    """0.4 ulp from a bf16 value stays below the rounding point and 0.6 ulp goes over it; 0 and -0 are one value."""
    start = torch.tensor([1.0, 1.0, 0.0, 1.5])
    ulp = 2.0**-7
    now = torch.tensor([1.0 + 0.4 * ulp, 1.0 + 0.6 * ulp, -0.0, 1.5])
    assert differs(start, now).tolist() == [False, True, False, False]


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (600, 520)])
def test_leading_values(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.svdvals(matrix.double())[:5].numpy()
    assert leading_values(matrix, 5)[:5] == pytest.approx(expected, rel=1e-5)


def test_a_resumed_run_measures_the_same(recipe: Recipe, tmp_path: Path) -> None:
    whole = train(recipe, tmp_path / "whole", quiet=True)
    assert run_in_child(_killed(recipe, tmp_path / "cut", "statewise.training.loop.take_step", 4)) == -signal.SIGKILL
    assert watched(train(recipe, tmp_path / "cut", resume=True, quiet=True)) == watched(whole)


def test_measuring_changes_no_weight(recipe: Recipe, plain: dict[str, Any], tmp_path: Path) -> None:  # noqa: F811
    seen = train(recipe, tmp_path / "seen", quiet=True).checkpoints()[LAST] / "model.safetensors"
    unseen = train(Recipe.from_plain(plain), tmp_path / "unseen", quiet=True).checkpoints()[LAST] / "model.safetensors"
    assert seen.read_bytes() == unseen.read_bytes()


def test_of_a_lora_it_is_the_change_that_the_adapter_makes(plain: dict[str, Any], tmp_path: Path) -> None:  # noqa: F811
    plain["model"]["adapter"] = {"rank": 2, "alpha": 8, "targets": ["q_proj", "down_proj"]}
    plain["diagnostics"] = [{"kind": "geometry", "every": 6, "k": 2}]
    run = train(Recipe.from_plain(plain), tmp_path / "run", quiet=True)
    state = load_file(run.checkpoints()[LAST] / "adapter_model.safetensors")
    pairs = [(state[n.replace("lora_A", "lora_B")].double(), a.double()) for n, a in state.items() if "lora_A" in n]
    row = watched(run)[LAST]
    assert row["frobenius"] == pytest.approx(np.mean([float((4 * b @ a).norm()) for b, a in pairs]), rel=1e-5)
    assert row["top2_energy"] == pytest.approx(1.0)
    plain["model"]["adapter"]["dora"] = True
    with pytest.raises(RecipeError, match="DoRA"):
        train(Recipe.from_plain(plain), tmp_path / "dora", quiet=True)


def test_two_processes_and_shards_measure_the_same(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = watched(run_on(1, recipe.to_plain(), tmp_path / "one"))
    two = watched(run_on(2, recipe.to_plain(), tmp_path / "two"))
    _shard_on_cpu(monkeypatch)
    sharded = watched(run_on(2, recipe.to_plain(), tmp_path / "sharded"))
    for step, row in one.items():
        assert two[step] == pytest.approx(row, rel=0.02) and sharded[step] == pytest.approx(row, rel=0.02)


def test_it_costs_less_than_three_percent_of_the_embedded_models_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processor time of one measurement against that of the `every` steps before it; measured 1 %."""
    spent: list[float] = []
    original = Watch.after_step

    def timed(self: Watch, step: int) -> dict[str, float]:
        start = time.thread_time()
        row = original(self, step)
        spent.append(time.thread_time() - start)
        return row

    monkeypatch.setattr(live.Watch, "after_step", timed)
    every, steps = 20, 4
    changes = [f"budget.max_steps={steps}", "budget.max_epochs=none", "eval.tasks=[]", "eval.probe=off"]
    recipe = Recipe.load("tiny_sft", [*changes, "diagnostics=[{kind='geometry',every=2}]"])
    start = time.thread_time()
    run = train(recipe, tmp_path / "run", quiet=True)
    seconds = time.thread_time() - start
    assert len(watched(run)) == 2
    measured = spent[-1]  # the first one pays for imports
    in_steps = sum(r["step_seconds"] for r in run.metrics()) / steps
    assert measured / every < 0.03 * min(in_steps, seconds / steps)


def test_a_diagnostic_that_fails_is_told_and_the_run_is_completed(plain: dict[str, Any], tmp_path: Path) -> None:  # noqa: F811
    class Broken(Diagnostic, kind="broken_for_test"):
        def compute(self, run: Any) -> list[dict[str, Any]]:
            raise ValueError("no data")

    run = train(Recipe.from_plain({**plain, "diagnostics": ["broken_for_test"]}), tmp_path / "run", quiet=True)
    assert run.status == "completed"
    assert run.info["warnings"] == ["diagnostic 'broken_for_test' failed: ValueError: no data"]


def test_refusals(plain: dict[str, Any]) -> None:  # noqa: F811
    with pytest.raises(RecipeError, match="did you mean 'geometry'"):
        Recipe.from_plain({**plain, "diagnostics": ["geometri"]})
    with pytest.raises(RecipeError, match=r"diagnostics\[0\]: 'geometry' is named twice"):
        Recipe.from_plain({**plain, "diagnostics": ["geometry", {"kind": "geometry", "every": 5}]})
