"""Whole comparisons: what is read from which checkpoint, resuming, workers, files, and the command."""

import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from statewise.errors import CheckpointError, RecipeError, RunError
from statewise.geometry import TIERS, Selection, Settings, prepare, run
from statewise.geometry.aggregate import aggregate
from statewise.geometry.workers import THREADS, each, one_thread_pool

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 32}
SHAPES = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "mlp.gate_proj": (96, 32)}
EVERY = Settings(TIERS, angle_k=8, rank=4)


def name_of(layer: int, stem: str) -> str:
    return f"model.layers.{layer}.{stem}.weight"


def save(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> str:
    directory.mkdir()
    save_file({name: t.contiguous() for name, t in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    return str(directory)


def model(seed: int = 0, layers: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = {name_of(layer, stem): shape for layer in range(layers) for stem, shape in SHAPES.items()}
    tensors = {n: (0.1 * torch.randn(*s, generator=generator)).bfloat16() for n, s in names.items()}
    return {**tensors, "model.embed_tokens.weight": torch.randn(50, 32, generator=generator).bfloat16()}


def moved(tensors: dict[str, torch.Tensor], size: float, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noise = {n: size * torch.randn(*t.shape, generator=generator) for n, t in tensors.items()}
    return {n: (t.float() + noise[n]).to(t.dtype) for n, t in tensors.items()}


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    before = model()
    return [save(tmp_path / "before", before), save(tmp_path / "after", moved(before, 1e-3))]


def test_numbers_of_a_matrix(pair: list[str]) -> None:
    rows = run(prepare(pair, Selection(), EVERY))
    assert [row["module"] for row in rows] == ["gate", "k", "q"] * 2
    assert {row["checkpoint"] for row in rows} == {pair[1]}
    w0, w1 = (load_file(f"{path}/model.safetensors")[rows[0]["matrix"]].double().numpy() for path in pair)
    s0, s1, own = (np.linalg.svd(x, compute_uv=False) for x in (w0, w1, w1 - w0))
    row = rows[0]
    assert row["changed"] == np.count_nonzero(w0 != w1) and row["sparsity"] == pytest.approx(1 - (w0 != w1).mean())
    assert row["rows_changed"] == pytest.approx((w0 != w1).mean(axis=1)) and row["heads_changed"] == []
    assert len(rows[2]["heads_changed"]) == 4
    assert row["delta_norm"] == pytest.approx(np.linalg.norm(w1 - w0))
    assert row["stable_rank"] == pytest.approx((own**2).sum() / own[0] ** 2)
    assert row["nss"] == pytest.approx(np.linalg.norm(s1 - s0) / np.linalg.norm(s0), rel=1e-9)
    assert row["one_minus_cosine"] == pytest.approx(
        1 - (w0 * w1).sum() / np.linalg.norm(w0) / np.linalg.norm(w1), rel=1e-6
    )
    u0, u1 = (np.linalg.svd(x)[0][:, : row["angle_k"]] for x in (w0, w1))
    cosines = np.linalg.svd(u0.T @ u1, compute_uv=False)
    assert row["angle_u_max"] == pytest.approx(np.degrees(np.arccos(cosines[-1])), rel=1e-6)


def test_rows_of_several_ends_say_how_alike_they_are(pair: list[str], tmp_path: Path) -> None:
    third = save(tmp_path / "third", moved(model(), 1e-3, seed=5))
    rows = run(prepare([*pair, third], Selection(("q",)), EVERY))
    assert len(rows) == 4 and [row["checkpoint"] for row in rows] == [pair[1], third] * 2
    assert rows[0]["similarity"][0] == pytest.approx(1) and rows[0]["similarity"][1] < 0.9
    assert rows[0]["jaccard"][0] == 1 and rows[0]["jaccard"][1] == rows[1]["jaccard"][0]
    alone = run(prepare([pair[0], third], Selection(("q",)), EVERY))
    assert {k: rows[1][k] for k in ("nss", "changed", "hill")} == {k: alone[0][k] for k in ("nss", "changed", "hill")}


def test_updates_of_one_norm(pair: list[str], tmp_path: Path) -> None:
    """Half an update measured beside the whole: at one norm they are the same update."""
    before, after = (load_file(f"{path}/model.safetensors") for path in pair)
    exact = {n: before[n].float() for n in before}
    half = save(tmp_path / "half", {n: exact[n] + 0.5 * (after[n].float() - exact[n]) for n in before})
    comparison = prepare([*pair, half], Selection(), replace(EVERY, same_norm=True))
    assert [place.share for place in comparison.places] == pytest.approx((0.5, 1.0))
    assert "0.5 of the way" in comparison.notes[-2] and "at its end" in comparison.notes[-1]
    rows = run(comparison)
    for one, other in zip(rows[::2], rows[1::2], strict=True):
        assert one["delta_norm"] == pytest.approx(other["delta_norm"])
        assert one["nss"] == pytest.approx(other["nss"], rel=1e-3) and one["changed"] == other["changed"]
    with pytest.raises(CheckpointError, match="does not differ"):
        prepare([pair[0], pair[0]], Selection(), replace(EVERY, same_norm=True))


def test_a_run_is_measured_where_it_first_had_the_norm(tmp_path: Path) -> None:
    """A course that turns: first 3 along one direction, then 4 along another; the other end has norm 1 or 4."""
    start = {name_of(0, "self_attn.q_proj"): torch.zeros(32, 32)}
    begin, run_dir = save(tmp_path / "start", start), tmp_path / "run"
    (name,) = start
    for step, (first, second) in {1: (3.0, 0.0), 2: (3.0, 4.0)}.items():
        weight = torch.zeros(32, 32)
        weight[0, 0], weight[1, 1] = first, second
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        save(run_dir / "checkpoints" / f"step_{step:06d}", {name: weight})
        (run_dir / "checkpoints" / f"step_{step:06d}" / "manifest.json").write_text("{}")
    (run_dir / "run.json").write_text("{}")
    settings = replace(EVERY, same_norm=True)
    for norm, where in {1.0: (1.0, 0.0), 4.0: (3.0, 7.0**0.5)}.items():
        away = torch.zeros(32, 32)
        away[5, 5] = norm
        comparison = prepare(
            [begin, str(run_dir), save(tmp_path / f"away_{norm}", {name: away})], Selection(), settings
        )
        there = comparison.places[0].of(comparison.matrices[0]).rows()
        assert (float(there[0, 0]), float(there[1, 1])) == pytest.approx(where)
        (row, _) = run(comparison)
        assert row["delta_norm"] == pytest.approx(norm)
    assert "from step_000001 to step_000002" in comparison.notes[-2]
    straight = prepare(
        [begin, str(run_dir / "checkpoints" / "step_000002"), str(tmp_path / "away_4.0")], Selection(), settings
    )
    assert straight.places[0].share == pytest.approx(4 / 5)  # a checkpoint given by itself has no course


def test_a_fused_checkpoint_has_the_numbers_of_its_parts(tmp_path: Path) -> None:
    stems = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    whole = {
        f"model.layers.0.{stem}.weight": torch.randn(s, 32).bfloat16()
        for stem, s in zip(stems, (32, 16, 16), strict=True)
    }
    after = moved(whole, 1e-2)
    fused = [{"model.layers.0.self_attn.qkv_proj.weight": torch.cat(list(t.values()))} for t in (whole, after)]
    apart = run(prepare([save(tmp_path / f"a{i}", t) for i, t in enumerate((whole, after))], Selection(), EVERY))
    joined = run(prepare([save(tmp_path / f"f{i}", t) for i, t in enumerate(fused)], Selection(), EVERY))
    assert [row["module"] for row in joined] == ["q", "k", "v"]
    for one, other in zip(sorted(apart, key=lambda row: "qkv".index(row["module"])), joined, strict=True):
        assert one["nss"] == other["nss"] and one["heads_changed"] == other["heads_changed"]


def test_shards_and_an_adapter_are_read_as_the_whole(pair: list[str], tmp_path: Path) -> None:
    tensors, shards = model(), tmp_path / "shards"
    shards.mkdir()
    names = sorted(tensors)
    for i, chosen in enumerate((names[:3], names[3:])):
        save_file({n: tensors[n] for n in chosen}, shards / f"model-{i}.safetensors")
    where = {n: f"model-{int(n in names[3:])}.safetensors" for n in names}
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert [row["changed"] for row in run(prepare([pair[0], str(shards)], Selection(), Settings()))] == [0] * 6

    adapter, target = tmp_path / "adapter", name_of(0, "mlp.gate_proj").removesuffix(".weight")
    adapter.mkdir()
    a, b = torch.randn(4, 32) * 0.02, torch.randn(96, 4) * 0.02
    save_file({f"base_model.model.{target}.lora_A.weight": a, f"base_model.model.{target}.lora_B.weight": b},
              adapter / "adapter_model.safetensors")  # fmt: skip
    config = {"peft_type": "LORA", "base_model_name_or_path": pair[0], "r": 4, "lora_alpha": 8}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    comparison = prepare([pair[0], str(adapter)], Selection(), EVERY)
    row = run(comparison)[0]
    own = np.linalg.svd(2.0 * (b.double() @ a.double()).numpy(), compute_uv=False)[:4]
    assert row["leading"][:4] == pytest.approx(own) and row["participation"] == pytest.approx(
        (own**2).sum() ** 2 / (own**4).sum()
    )
    assert any("rounded to bf16 for support and masks" in note for note in comparison.notes)


def test_what_does_not_fit_is_named(pair: list[str], tmp_path: Path) -> None:
    other = model()
    other[name_of(0, "mlp.gate_proj")] = torch.zeros(64, 32, dtype=torch.bfloat16)
    del other[name_of(1, "self_attn.k_proj")]
    wrong = save(tmp_path / "wrong", other)
    with pytest.raises(CheckpointError) as error:
        prepare([pair[0], wrong], Selection(), Settings())
    for part in (name_of(0, "mlp.gate_proj"), "(96, 32)", "(64, 32)", name_of(1, "self_attn.k_proj"), "missing"):
        assert part in str(error.value)
    assert len(prepare([pair[0], wrong], Selection(("q",)), Settings()).matrices) == 2
    with pytest.raises(CheckpointError, match="given twice"):
        prepare([pair[0], pair[1], pair[1]], Selection(), Settings())
    with pytest.raises(CheckpointError, match="at least one end"):
        prepare(pair[:1], Selection(), Settings())
    with pytest.raises(RecipeError, match="gaet"):
        Selection(("gaet",))
    broken = model()
    broken[name_of(0, "mlp.gate_proj")][2, 3] = float("nan")
    with pytest.raises(CheckpointError, match="gate_proj.*NaN"):
        run(prepare([pair[0], save(tmp_path / "nan", broken)], Selection(), EVERY))


def test_killed_in_the_middle_it_goes_on_to_the_same_bytes(pair: list[str], tmp_path: Path) -> None:
    comparison, cut = prepare(pair, Selection(), EVERY), tmp_path / "cut"
    run(comparison, tmp_path / "whole")

    def until_killed() -> None:
        def die(done: int, total: int, name: str) -> None:
            if done == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        run(comparison, cut, progress=die)

    child = multiprocessing.get_context("fork").Process(target=until_killed)
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert len(list((cut / "parts").glob("*.parquet"))) == 3 and not (cut / "results.json").exists()
    for file in ("geometry.json", "results.json", "matrices.parquet"):
        (cut / f".{file}.0123456789ab.tmp").write_bytes(b"as a kill in its writing leaves it")
    measured: list[int] = []
    run(comparison, cut, progress=lambda done, total, name: measured.append(done))
    assert measured == [4, 5, 6]
    for file in ("geometry.json", "results.json", "matrices.parquet"):
        assert (cut / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert not list(cut.rglob("*.tmp"))


def test_an_output_of_something_else_is_left_alone(pair: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(prepare(pair, Selection(), Settings()), out)
    with pytest.raises(RunError, match="another comparison"):
        run(prepare(pair, Selection(), EVERY), out)
    with pytest.raises(RunError, match="not empty"):
        run(prepare(pair, Selection(), Settings()), tmp_path)


def test_workers_give_the_same_rows(pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    comparison = prepare(pair, Selection(("q",)), EVERY)
    one, two = run(comparison), run(comparison, workers=2)
    timeless = [[{k: v for k, v in r.items() if not k.startswith("seconds")} for r in rows] for rows in (one, two)]
    assert str(timeless[0]) == str(timeless[1])
    with one_thread_pool(1) as pool:
        assert pool.submit(os.getenv, THREADS[0]).result() == "1"
    assert os.environ["OMP_NUM_THREADS"] == "2" and THREADS[1] not in os.environ


def _die(shared: int, job: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_told() -> None:
    with pytest.raises(RunError, match="fewer --workers"):
        list(each(_die, 0, [1, 2], 2))


def test_means_plain_and_by_parameters(pair: list[str]) -> None:
    rows = run(prepare(pair, Selection(), Settings()))
    found = aggregate(rows)[pair[1]]
    assert set(found) == {"all", "module q", "module k", "module gate", "layer 0", "layer 1"}
    sparsity, entries = np.array([r["sparsity"] for r in rows]), np.array([r["entries"] for r in rows])
    assert found["all"]["sparsity"]["mean"] == pytest.approx(sparsity.mean())
    assert found["all"]["sparsity"]["weighted"] == pytest.approx(1 - sum(r["changed"] for r in rows) / entries.sum())
    assert found["layer 1"]["sparsity"]["n"] == 3


def test_the_command(pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from statewise.cli import main

    def call(*arguments: str) -> Any:
        with pytest.raises(SystemExit) as ended:
            main(["geometry", *pair, *arguments])
        return ended.value.code

    out = tmp_path / "out"
    assert call("--all", "--angle-k", "8", "--out", str(out)) == 0
    printed = capsys.readouterr()
    assert "low" in printed.out and "spectrum: about" in printed.err and "6 matrices" in printed.err
    page = (out / "geometry.html").read_text(encoding="utf-8")
    assert "Where the changed entries lie" in page and "Choices: 6 matrices" in page
    assert call("--all", "--angle-k", "8", "--out", str(out), "--json", "--quiet") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["alpha"] == 0.3 and found["aggregates"][pair[1]]["all"]["nss"]["n"] == 6
    assert call("--out", str(out)) != 0 and "another comparison" in capsys.readouterr().err


def test_another_file_is_another_comparison(pair: list[str]) -> None:
    comparison = prepare(pair, Selection(), Settings())
    assert comparison.key == prepare(pair, Selection(), Settings()).key
    assert comparison.key != prepare(pair[::-1], Selection(), Settings()).key
    assert comparison.key != prepare(pair, Selection(), Settings(tolerance=1e-6)).key
