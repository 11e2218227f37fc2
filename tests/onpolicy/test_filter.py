"""Choosing from scored data: bounds, quantiles, budgets, orders; and that the input stays as it was."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.onpolicy.conftest import Rows, column

from statewise.errors import DataError, RecipeError, RunError
from statewise.onpolicy import filtering
from statewise.onpolicy.filtering import Choice, filter_data, select
from statewise.onpolicy.scoring import Scores

TABLE = {
    "index": np.arange(6),
    "mean_phi": np.array([-0.5, 0.1, -0.2, 0.0, -3.0, 0.3]),
    "sum_phi": np.array([-5.0, 1.0, -2.0, 0.0, -30.0, 3.0]),
    "z": np.array([-1.0, 0.5, -0.5, np.nan, -9.0, 1.0]),
    "min_phi": np.array([-6.0, -1.0, -2.0, 0.0, -9.0, -1.0]),
    "perplexity": np.array([2.0, 1.0, 1.5, 1.2, 9.0, 1.1]),
    "num_tokens": np.array([10, 10, 10, 10, 10, 10]),
    "share_below": np.array([0.1, 0.0, 0.0, 0.0, 0.4, 0.0]),
}


@pytest.mark.parametrize(
    ("choice", "kept"),
    [
        ({"min_mean_phi": -0.2}, [1, 2, 3, 5]),
        ({"min_mean_phi": -0.2, "max_mean_phi": 0.1}, [1, 2, 3]),
        ({"min_z": -0.5}, [1, 2, 3, 5]),
        ({"max_z": 0.0}, [0, 2, 3, 4]),
        ({"max_share_below": 0.1}, [0, 1, 2, 3, 5]),
        ({"quantiles": (0.5, 1.0)}, [1, 3, 5]),
        ({"quantiles": (0.0, 1 / 3)}, [0, 4]),
        ({"max_rows": 2}, [1, 5]),
        ({"max_tokens": 35}, [1, 3, 5]),
        ({"max_tokens": 35, "max_rows": 2}, [1, 5]),
        ({"max_rows": 2, "by": "min_phi"}, [1, 3]),
        ({"max_rows": 2, "by": "perplexity"}, [1, 5]),
        ({"sort": "easy_first"}, [5, 1, 3, 2, 0, 4]),
        ({"sort": "hard_first", "min_mean_phi": -1}, [0, 2, 3, 1, 5]),
        ({"sort": "easy_first", "by": "perplexity", "max_rows": 3}, [1, 5, 3]),
    ],
)
def test_select(choice: dict[str, Any], kept: list[int]) -> None:
    found, reasons = select(TABLE, Choice(**choice))
    assert found.tolist() == kept
    assert sum(reasons.values()) == 6 - len(kept)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_come_out_as_they_were(scored: Callable[..., Scores], rows: Rows, tmp_path: Path) -> None:
    scores = scored()
    means = np.array(column(scores, "mean_phi"))
    bound = float(np.median(means))
    before = (tmp_path / "scores.jsonl").read_bytes()
    record = filter_data(scores, tmp_path / "kept.jsonl", min_mean_phi=bound, sort="easy_first")
    order = [i for i in np.argsort(-means, kind="stable") if means[i] >= bound]
    assert lines(tmp_path / "kept.jsonl") == [rows[i] for i in order]
    assert record == json.loads((tmp_path / "kept.jsonl.choice.json").read_text())
    counts = np.array(column(scores, "num_tokens"))
    assert (
        record["before"]["rows"] == 40
        and record["after"]["rows"] == len(order) == 40 - record["left_out"]["min_mean_phi"]
    )
    expected = (means * counts)[order].sum() / counts[order].sum()
    assert record["after"]["mean_phi"] == pytest.approx(expected) and expected > record["before"]["mean_phi"]
    assert record["choice"]["min_mean_phi"] == bound
    assert (tmp_path / "scores.jsonl").read_bytes() == before
    filter_data(scores.path, tmp_path / "kept.parquet", quantiles=(0.25, 1.0))
    from datasets import Dataset

    assert Dataset.from_parquet(str(tmp_path / "kept.parquet")).to_list() == [
        row for i, row in enumerate(rows) if np.argsort(np.argsort(means))[i] >= 10
    ]


def test_killed_before_the_rows_had_their_name(
    scored: Callable[..., Scores], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are never rows without their record, and the same command can be given again."""
    scores, out = scored(), tmp_path / "kept.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(filtering, "atomic_write", lambda file, text: (file.write_text(text), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            filter_data(scores, out, max_rows=3)
    assert not out.exists() and filtering.record_file(out).is_file()
    assert filter_data(scores, out, max_rows=2)["after"]["rows"] == len(lines(out)) == 2
    assert json.loads(filtering.record_file(out).read_text())["after"]["rows"] == 2


def test_bad_rows_are_never_kept(scored: Callable[..., Scores], rows: Rows, tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    file.write_text("\n".join(json.dumps(r) for r in (rows[0], {"no": 1}, rows[1])) + "\n")
    record = filter_data(scored({"data": str(file), "on_bad_row": "skip"}), tmp_path / "kept.jsonl", sort="hard_first")
    assert record["bad_rows"] == 1
    assert {row["id"] for row in lines(tmp_path / "kept.jsonl")} == {row["id"] for row in rows[:2]}


def test_refused(scored: Callable[..., Scores], rows: Rows, tmp_path: Path) -> None:
    scores = scored()
    data = tmp_path / "scores.jsonl"
    with pytest.raises(RecipeError, match="exists; choose another output"):
        filter_data(scores, data, max_rows=1)
    with pytest.raises(RecipeError, match="nothing is chosen"):
        filter_data(scores, tmp_path / "kept.jsonl")
    with pytest.raises(RecipeError, match=r"ends in .jsonl or .parquet"):
        filter_data(scores, tmp_path / "kept.csv", max_rows=1)
    with pytest.raises(RecipeError, match="two shares, the lower first"):
        filter_data(scores, tmp_path / "kept.jsonl", quantiles=(1.0, 0.5))
    with pytest.raises(DataError, match=r"keeps none of 40 samples \(min_mean_phi left out 40\)") as refused:
        filter_data(scores, tmp_path / "kept.jsonl", min_mean_phi=100)
    phi = np.concatenate([batch["mean_phi"] for batch in scores.batches("mean_phi")])
    low, median, high = (f"{x:.4g}" for x in (phi.min(), np.median(phi), phi.max()))
    assert f"samples: mean_phi: min {low}, median {median}, max {high}." in str(refused.value)
    with pytest.raises(DataError, match=r"num_tokens: min \d+, median"):
        filter_data(scores, tmp_path / "kept.jsonl", max_tokens=1)
    assert not list(tmp_path.glob("kept*")) and not list(tmp_path.glob(".kept*"))
    (tmp_path / "shards").mkdir()
    data.rename(tmp_path / "shards" / "a.jsonl")
    of_directory = scored(tmp_path / "shards", name="second")
    with pytest.raises(RecipeError, match="lies in the input"):
        filter_data(of_directory, tmp_path / "shards" / "b.jsonl", max_rows=1)
    with (tmp_path / "shards" / "a.jsonl").open("a") as file:
        file.write(json.dumps(rows[0]) + "\n")
    with pytest.raises(RunError, match="the data changed since they were scored"):
        filter_data(of_directory, tmp_path / "kept.jsonl", max_rows=1)
