"""Building the embedded model: same bytes each time, replaced whole, refusals, the schedule."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from statewise.errors import DataError
from statewise.tiny import build as building
from statewise.tiny.build import BuildRecipe, build, learning_rate

MICRO = BuildRecipe(
    steps=3, batch_rows=4, row_tokens=48, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2,
    num_kv_heads=1, vocab_size=300, evaluate_every=2, curve_items=3, final_items=3,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "TOKENIZER_DOCUMENTS", 300)


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_same_seed_same_bytes_and_an_earlier_build_is_replaced_whole(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    points: list[dict] = []
    report = build(first, seed=1, recipe=MICRO, progress=points.append)
    build(second, seed=1, recipe=MICRO)
    assert contents(first) == contents(second)
    assert json.loads((first / "build.json").read_text()) == json.loads(json.dumps(report))
    assert [point["step"] for point in points] == [2]
    (second / "leftover").write_text("from an earlier build")
    build(second, seed=2, recipe=MICRO)
    assert contents(second)["model.safetensors"] != contents(first)["model.safetensors"]
    assert contents(second).keys() == contents(first).keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_a_build_that_dies_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "base"
    build(out, recipe=MICRO)
    before = contents(out)

    def die(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(building, "evaluate", die)
    with pytest.raises(KeyboardInterrupt):
        build(out, recipe=replace(MICRO, evaluate_every=9))
    assert contents(out) == before and list(tmp_path.iterdir()) == [out]


def test_a_directory_that_is_no_build_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"no build\.json"):
        build(tmp_path, recipe=MICRO)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_schedule_warms_up_stays_and_decays() -> None:
    recipe = BuildRecipe(steps=100, warmup_steps=10, decay_steps=20, lr=2.0)
    rates = [learning_rate(step, recipe) for step in range(100)]
    assert rates[:3] == pytest.approx([0.2, 0.4, 0.6])
    assert set(rates[10:80]) == {2.0}
    assert rates[90] == pytest.approx(1.0) and rates[99] == pytest.approx(0.1)
