"""Trajectories: planted subspaces are found, nulls show what a sum shows by itself, lock times, resuming."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from statewise.errors import CheckpointError, RecipeError, RunError
from statewise.geometry import Selection, locking
from statewise.geometry.follow import follow
from statewise.geometry.locking import lock_index, shuffled, similarities, unrelated
from statewise.geometry.panels import trajectory_panels
from statewise.geometry.table import read_parquet
from statewise.geometry.trajectory import Choices, locks, means, of_list

M, N, K = 48, 64, 4
NAME = "model.layers.0.self_attn.q_proj.weight"


def parts(count: int, shared: bool, noise: float = 0.01) -> list[torch.Tensor]:
    """Updates of rank K and singular values near 1, all in one right subspace or each in its own."""
    generator = torch.Generator().manual_seed(0)

    def gaussian(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    one = torch.linalg.qr(gaussian(N, K)).Q
    found = []
    for _ in range(count):
        right = one if shared else torch.linalg.qr(gaussian(N, K)).Q
        left = torch.linalg.qr(gaussian(M, K)).Q
        found.append(left @ right.T + noise * gaussian(M, N) / N)
    return found


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ([0.1, 0.95, 0.5, 0.9, 1.0], 3),
        ([0.9, 0.95, 1.0], 0),
        ([0.1, 0.2], None),
        ([0.95, float("nan"), 1.0], 2),
        ([], None),
    ],
)
def test_a_curve_locks_where_it_stays_above(curve: list[float], expected: int | None) -> None:
    assert lock_index(curve, 0.9) == expected


def test_a_shared_subspace_is_there_from_the_first_part() -> None:
    curve = similarities(parts(5, shared=True), K)
    assert min(curve) > 0.99 and curve[-1] == pytest.approx(1.0)
    random = np.random.default_rng(0)
    assert min(shuffled(parts(5, shared=True), K, random)) > 0.99
    lost = unrelated(parts(5, shared=True), K, random)
    assert lost[0] < 0.5 and lost[-1] == pytest.approx(1.0)


def test_unrelated_parts_look_alike_under_their_null_and_rise_all_the_same() -> None:
    """What a curve of cumulative updates shows where nothing is shared: the bias that the null is there for."""
    own = similarities(parts(8, shared=False), K)
    null = np.mean([unrelated(parts(8, shared=False), K, np.random.default_rng(i)) for i in range(6)], axis=0)
    assert own[-2] > 0.7 > 3 * K / N  # high before the end, far above chance
    assert np.abs(np.array(own) - null).mean() < 0.12
    again = np.mean([unrelated(parts(8, shared=True), K, np.random.default_rng(i)) for i in range(6)], axis=0)
    assert np.abs(np.array(similarities(parts(8, shared=True), K)) - again).mean() > 0.2


def test_unrelated_keeps_singular_values(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(locking, "similarities", lambda turned, k: seen.extend(turned))
    given = parts(2, shared=True)
    unrelated(given, K, np.random.default_rng(0))
    for before, after in zip(given, seen, strict=True):
        assert torch.allclose(torch.linalg.svdvals(before), torch.linalg.svdvals(after), atol=1e-5)
        assert not torch.allclose(before, after)


def write(path: Path, matrix: torch.Tensor) -> str:
    path.mkdir()
    save_file({NAME: matrix.contiguous()}, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return str(path)


@pytest.fixture
def points(tmp_path: Path) -> list[str]:
    """A start and four checkpoints that move in one subspace, each part half as large as the one before."""
    start = torch.randn(M, N, generator=torch.Generator().manual_seed(1))
    sums = np.cumsum([p.numpy() * 0.5**i for i, p in enumerate(parts(4, shared=True))], axis=0)
    weights = [start, *(start + torch.from_numpy(s) for s in sums)]
    return [write(tmp_path / f"w{i}", w) for i, w in enumerate(weights)]


def test_numbers_of_a_planted_trajectory(points: list[str], tmp_path: Path) -> None:
    choices = Choices(k=K, hill_k=4, draws=2)
    rows = follow([of_list(points, Selection())], choices, tmp_path / "out")
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and [row["progress"] for row in rows] == [0.25, 0.5, 0.75, 1.0]
    assert [row["part_norm"] for row in rows] == pytest.approx([2.0, 1.0, 0.5, 0.25], rel=0.02)
    for row in rows:
        assert row["sim_end"] > 0.99 and row["sim_part_end"] > 0.99 and row["gap"] > 0.9
        assert row[f"top_{K}_energy"] > 0.99 and 1 <= row["stable_rank"] <= K + 0.01
        assert row["sim_random"] == K / N
    assert rows[0]["sim_part"] is None and rows[1]["sim_part"] > 0.99
    assert rows[-1]["delta_norm"] == pytest.approx(float(_difference(points).norm()), rel=1e-6)
    found = locks(rows, 0.9)
    assert found["sim_end"] == found["median"] == 0.25
    assert found["sim_end_unrelated"] == 0.25  # of parts that halve the first is most of the sum, whatever they share
    (point, *_) = means(rows)
    assert point["delta_norm"] == point["delta_norm_weighted"] == rows[0]["delta_norm"]


def _difference(points: list[str]) -> torch.Tensor:
    from safetensors.torch import load_file

    first, last = (load_file(Path(p) / "model.safetensors")[NAME].double() for p in (points[0], points[-1]))
    return last - first


def test_files_and_going_on(points: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from statewise.geometry import follow as module

    followed, choices, out = [of_list(points, Selection())], Choices(k=K, hill_k=4, draws=1), tmp_path / "out"
    rows = follow(followed, choices, out)
    assert read_parquet(out / "trajectory.parquet") == rows
    kept = json.loads((out / "trajectory.json").read_text())
    assert kept["choices"]["k"] == K and kept["runs"][0]["steps"] == [1, 2, 3, 4]
    before = (out / "trajectory.json").read_bytes()
    monkeypatch.setattr(module, "measure_matrix", lambda *_: pytest.fail("is done already"))
    assert follow(followed, choices, out) == rows and (out / "trajectory.json").read_bytes() == before
    with pytest.raises(RunError, match="other trajectories"):
        follow(followed, Choices(k=K + 1), out)
    with pytest.raises(RunError, match="not empty"):
        follow(followed, choices, tmp_path)
    with pytest.raises(RecipeError, match="given twice"):
        follow([*followed, *followed], choices, tmp_path / "twice")
    with pytest.raises(CheckpointError, match="a start and two"):
        of_list(points[:2], Selection())


def test_panels_of_two_runs(points: list[str], tmp_path: Path) -> None:
    rows = means(follow([of_list(points, Selection())], Choices(k=K, hill_k=4, draws=1), tmp_path / "out"))
    figure = trajectory_panels({"a<b>": rows, "b": rows}, K, 4)
    titles = [a["text"] for a in figure["layout"]["annotations"]]
    assert len(titles) == 6 and figure["layout"]["showlegend"]
    assert len(figure["data"]) == 2 * (6 + 3) and {trace["yaxis"] for trace in figure["data"]} == {
        "y", "y2", "y3", "y4", "y5", "y6"
    }  # fmt: skip
    assert all("<b>" not in trace["name"] for trace in figure["data"])
    assert sum(trace.get("showlegend", False) for trace in figure["data"]) == 2
    seeds = trajectory_panels({"a-seed0-1f": rows, "a-seed1-2e": rows, "b": rows}, K, 4)["data"]
    named = [trace["name"] for trace in seeds if trace.get("showlegend")]
    assert named == ["a", "b"] and len({trace["line"]["color"] for trace in seeds}) == 2
    assert {trace["legendgroup"] for trace in seeds} == {"a", "b"}


def test_the_command(points: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from statewise.cli import main

    options = [
        "--trajectory",
        "--top",
        str(K),
        "--hill-k",
        "4",
        "--draws",
        "1",
        "--out",
        str(tmp_path / "out"),
        "--quiet",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["geometry", *points, *options, "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"][0]["locks"]["sim_end"] == 0.25 and found["choices"]["threshold"] == 0.9
    page = (tmp_path / "out" / "trajectory.html").read_text(encoding="utf-8")
    assert "stable rank of D" in page and "Where each curve locks" in page
    with pytest.raises(SystemExit):
        main(["geometry", *points, *options])
    printed = capsys.readouterr().out
    assert "unrelated" in printed and f"K = {K} right singular vectors" in printed
    with pytest.raises(SystemExit) as ended:
        main(["geometry", points[0], *options])
    assert ended.value.code == 2 and "expected a start and two or more points" in capsys.readouterr().err
