"""`statewise geometry` against the papers' way, two full float64 SVDs a matrix, and against singular values in float32.

A pair is bf16 weights with a power-law head and an update of 8e-4 of their norm, half of it in 24 directions. statewise takes
all five tiers, the papers' way the two SVDs alone. Seconds are a matrix's share of both cores: the SVDs (NumPy's, quicker here
than torch's) use two threads, as they do by themselves, or a worker and a matrix a core like statewise. Then accuracy, the
shapes of Qwen3-8B, and peak memory.

    python -m benchmarks.geometry [--sizes 1024 2048 4096] [--no-qwen]
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.measure import in_turn, median, peak_bytes, peak_in_own_process, table
from statewise.geometry import TIERS, Selection, Settings, Weights, decompose, prepare
from statewise.geometry.angles import exact_angles
from statewise.geometry.compare import Comparison, measure_matrix
from statewise.geometry.workers import one_thread_pool
from statewise.stats.spectra import principal_angles, spectral_shift

ROUNDS = {1024: 5, 2048: 3, 4096: 1}
CORES = 2
LAYERS = 36
QWEN3_8B = {(4096, 4096): 2 * LAYERS, (1024, 4096): 2 * LAYERS, (4096, 12288): 3 * LAYERS}  # q o, k v, gate up down
SVDS, EXACT, CACHED = "two float64 SVDs, two threads", "statewise, exact", "statewise, W0 in the cache"
NAME = "model.layers.{}.self_attn.q_proj.weight"


def pair(m: int, n: int, seed: int, relative: float = 8e-4) -> tuple[torch.Tensor, torch.Tensor]:
    """(W0, W+) in bf16: noise and 64 directions; an update of 24 directions and as much noise."""
    random = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=random)
    bulk, head = draw(m, n), (draw(m, 64) * torch.arange(1, 65) ** -0.7) @ draw(64, n)
    before = (0.02 * (bulk + 0.7 * head / head.std())).bfloat16()
    noise, low = draw(m, n), (draw(m, 24) * torch.arange(1, 25) ** -0.8) @ draw(24, n)
    update = noise / noise.norm() + low / low.norm()
    update *= relative * before.float().norm() / update.norm()
    return before, (before.float() + update).bfloat16()


def checkpoints(folder: Path, shape: tuple[int, int]) -> list[Path]:
    """Two directories with a matrix a core."""
    pairs = [pair(*shape, seed) for seed in range(CORES)]
    found = [folder / f"{shape[0]}x{shape[1]}_{name}" for name in ("before", "after")]
    for index, directory in enumerate(found):
        directory.mkdir(exist_ok=True)
        save_file({NAME.format(i): p[index] for i, p in enumerate(pairs)}, directory / "model.safetensors")
    return found


def two_svds(comparison: Comparison, index: int = 0) -> list[Any]:
    start, end = (comparison.matrices[index].of(c).stored.double().numpy() for c in comparison.checkpoints)
    return [np.linalg.svd(w, full_matrices=False) for w in (start, end)]


def one_thread_svds(comparison: Comparison, index: int) -> None:
    two_svds(comparison, index)


def on_both(pool: Executor, work: Callable[[Comparison, int], Any], comparison: Comparison) -> list[Any]:
    return list(pool.map(work, [comparison] * CORES, range(CORES)))


def contest(pool: Executor, folder: Path, size: int) -> dict[str, float]:
    """Seconds a matrix, and what the numbers are off by; returns the seconds."""
    exact, cached = (prepare(checkpoints(folder, (size, size)), Selection(), s) for s in settings(folder))
    kept: dict[str, Any] = {}

    def keep(name: str, work: Callable[[], Any]) -> Callable[[], None]:
        return lambda: kept.update({name: work()})

    contestants = {
        SVDS: keep("svd", lambda: two_svds(exact)),
        EXACT: keep("exact", lambda: on_both(pool, measure_matrix, exact)),
        CACHED: keep("cached", lambda: on_both(pool, measure_matrix, cached)),
    }
    if size < max(ROUNDS):
        contestants["two float64 SVDs, a matrix a core"] = lambda: on_both(pool, one_thread_svds, exact)
    seconds = in_turn(contestants, ROUNDS.get(size, 1))
    shares = {name: median(s) / (1 if name == SVDS else CORES) for name, s in seconds.items()}
    rows = [[name, f"{s:.2f}", f"{shares[SVDS] / s:.1f}"] for name, s in sorted(shares.items(), key=lambda x: -x[1])]
    print(f"\n{size} x {size}\n" + table(rows, ("", "seconds a matrix", "times as fast")), flush=True)
    print(table(errors(exact, kept), ("", "NSS", "off by", "largest angle U", "off by", "curve off by")), flush=True)
    return shares


def settings(folder: Path) -> tuple[Settings, Settings]:
    return Settings(TIERS), Settings(TIERS, cache=str(folder / "cache"))


def errors(comparison: Comparison, kept: dict[str, Any]) -> list[list[str]]:
    """NSS and angles of U against those of the float64 SVDs."""
    (u0, s0, _), (u1, s1, _) = kept["svd"]
    rows = {name: kept[name][0][0] for name in ("exact", "cached")}
    k = rows["exact"]["angle_k"]
    true, curve = spectral_shift(s0, s1), principal_angles(u0[:, :k], u1[:, :k])
    found = [["float64 SVDs", f"{true:.6e}", "", f"{curve[0]:.4f}°", "", ""]]
    for row in rows.values():
        angles = np.asarray(row["angles_u"])
        off = np.linalg.norm(angles - curve) / np.linalg.norm(curve)
        worst = angles[0] / curve[0] - 1
        shift = row["nss"] / true - 1
        label = f"statewise, {row['method'].replace('_', ' ')}"
        found.append([label, f"{row['nss']:.6e}", f"{shift:+.0e}", f"{angles[0]:.4f}°", f"{worst:+.0e}", f"{off:.0e}"])
    start, end = (comparison.matrices[0].of(c).stored.float() for c in comparison.checkpoints)
    values = [torch.linalg.svdvals(w).double().numpy() for w in (start, end)]
    single = spectral_shift(*values)
    return [*found, ["float32 svdvals", f"{single:.6e}", f"{single / true - 1:+.0e}", "", "", ""]]


def floors(size: int = 1024, k: int = 64, degrees: float = 1e-3) -> None:
    """What is found where the truth is known: a shift of 0, and an angle of a thousandth of a degree."""
    weights, _ = pair(size, size, 0)
    random = np.random.default_rng(0)
    shuffled = weights[random.permutation(size)][:, random.permutation(size)]
    single = [torch.linalg.svdvals(w.float()).numpy() for w in (weights, shuffled)]
    exact = [decompose(Weights(w), 0).s for w in (weights, shuffled)]
    u, s, vt = torch.linalg.svd(weights.double())
    turned, (c, sine) = u.clone(), (math.cos(math.radians(degrees)), math.sin(math.radians(degrees)))
    turned[:, :k], turned[:, k : 2 * k] = c * u[:, :k] + sine * u[:, k : 2 * k], c * u[:, k : 2 * k] - sine * u[:, :k]
    both = [(basis * s) @ vt for basis in (u, turned)]
    left = [torch.linalg.svd(w.float())[0][:, :k] for w in both]
    cosines = torch.linalg.svdvals(left[0].T @ left[1]).clamp(max=1)
    arccos = torch.rad2deg(torch.arccos(cosines))
    ours = exact_angles(*(decompose(Weights(w), k) for w in both), k)["u"]
    rows = [
        ["float32", f"{spectral_shift(*single):.0e}", f"{arccos.min():.1g}° to {arccos.max():.1g}°"],
        ["statewise", f"{spectral_shift(*exact):.0e}", f"{ours.min():.7f}° to {ours.max():.7f}°"],
    ]
    print("\n" + table(rows, ("", "NSS of a shuffled matrix (0)", f"{k} angles (all {degrees}°)")), flush=True)


def qwen(pool: Executor, folder: Path, known: dict[tuple[int, int], dict[str, float]]) -> None:
    """Seconds of every shape of Qwen3-8B, measured once where they are not known, times how often it has it; both cores."""
    totals = dict.fromkeys((SVDS, EXACT, CACHED), 0.0)
    for shape, count in QWEN3_8B.items():
        shares = known.get(shape) or once(pool, folder, shape)
        print(f"  {shape}: {', '.join(f'{name} {shares[name]:.1f} s' for name in totals)}", file=sys.stderr, flush=True)
        totals = {name: seconds + count * shares[name] for name, seconds in totals.items()}
    rows = [[name, f"{s / 60:,.0f}", f"{totals[SVDS] / s:.1f}"] for name, s in totals.items()]
    print("\nQwen3-8B, 252 matrices, two cores\n" + table(rows, ("", "minutes", "times as fast")), flush=True)
    peaks = []
    for mode in ("exact", "cached"):
        before, peak = peak_in_own_process("benchmarks.geometry", ["--peak", str(folder), mode])
        peaks.append([f"statewise, {mode}", f"{before / 2**20:,.0f}", f"{peak / 2**20:,.0f}"])
    print(table(peaks, ("4096 x 12288, one worker", "MiB before", "peak MiB")), flush=True)


def once(pool: Executor, folder: Path, shape: tuple[int, int]) -> dict[str, float]:
    """Seconds a matrix of each, one round."""
    exact, cached = (prepare(checkpoints(folder, shape), Selection(), s) for s in settings(folder))
    on_both(pool, measure_matrix, cached)  # fills the cache
    work: dict[str, Callable[[], object]] = {
        SVDS: lambda: two_svds(exact),
        EXACT: lambda: on_both(pool, measure_matrix, exact),
        CACHED: lambda: on_both(pool, measure_matrix, cached),
    }
    found = {}
    for name, run in work.items():
        started = time.perf_counter()
        run()
        found[name] = (time.perf_counter() - started) / (1 if name == SVDS else CORES)
    return found


def peak(folder: Path, mode: str) -> None:
    torch.set_num_threads(1)
    before = peak_bytes()
    where = [folder / f"4096x12288_{name}" for name in ("before", "after")]
    measure_matrix(prepare(where, Selection(), settings(folder)[mode == "cached"]), 0)
    print(before, peak_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(ROUNDS))
    parser.add_argument("--no-qwen", action="store_true", help="leave out Qwen3-8B's shapes and the peak of memory")
    parser.add_argument("--peak", nargs=2, metavar=("FOLDER", "MODE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        return peak(Path(arguments.peak[0]), arguments.peak[1])
    torch.set_num_threads(CORES)
    with tempfile.TemporaryDirectory() as folder, one_thread_pool(CORES) as pool:
        floors()
        known = {(size, size): contest(pool, Path(folder), size) for size in arguments.sizes}
        if not arguments.no_qwen:
            qwen(pool, Path(folder), known)


if __name__ == "__main__":
    main()
