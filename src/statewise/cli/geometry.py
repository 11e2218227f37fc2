"""`statewise geometry`: what training did to the weights."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from statewise.cli.output import print_json, print_table, say
from statewise.errors import Interrupted

if TYPE_CHECKING:
    from statewise.geometry.compare import Comparison

# What the printed table shows of each tier: (heading, column).
SHOWN = {
    "support": (("sparsity", "sparsity"), ("|D|<=tol", "sparsity_tolerance"), ("row disp.", "row_dispersion")),
    "update": (
        ("||D||", "delta_norm"),
        ("||D||/||W0||", "relative_norm"),
        ("stable rank", "stable_rank"),
        ("Hill", "hill"),
        ("top-16", "top_16_energy"),
    ),
    "spectrum": (("NSS", "nss"), ("drift/D", "drift_ratio"), ("eff. rank", "effective_rank")),
    "angles": (("U max deg", "angle_u_max"), ("V max deg", "angle_v_max"), ("U median", "angle_u_median")),
    "masks": (
        ("principal", "principal_overlap"),
        ("null", "principal_gaussian_null"),
        ("low", "low_overlap"),
        ("null ", "low_gaussian_null"),
    ),
}


CHECKPOINTS = typer.Argument(
    metavar="W0 W1 [W2 ...] | --trajectory RUN...",
    help="Directories, PEFT adapters, runs (their newest checkpoint), hub ids, or tiny.",
)
MODULES = typer.Option("linear", help="q,k,v,o,gate,up,down,other,embed,lm_head,rest; attention, mlp, linear, all.")
EXCLUDE = typer.Option([], help="Leave out matrices of this name or pattern; may be given several times.")
CACHE = typer.Option(None, help="Keep decompositions of W0 here, and use first order where it is good enough.")
TRAJECTORY = typer.Option(
    False, "--trajectory", help="Follow each run over its checkpoints, or the checkpoints given, in order."
)


def command(
    checkpoints: list[str] = CHECKPOINTS,
    support: bool = typer.Option(False, "--support", help="Which entries differ in bf16."),
    update: bool = typer.Option(False, "--update", help="Norms, cosine, stable rank, top-k energy, Hill."),
    spectrum: bool = typer.Option(False, "--spectrum", help="NSS, drift ratio, effective ranks, Hill curve."),
    angles: bool = typer.Option(False, "--angles", help="Rotation of the leading singular subspaces."),
    masks: bool = typer.Option(False, "--masks", help="Principal and low-magnitude overlaps with their nulls."),
    everything: bool = typer.Option(False, "--all", help="All five tiers; support and update where none is named."),
    modules: str = MODULES,
    layers: str = typer.Option(None, help="Such as 0-3,7; default: all."),
    exclude: list[str] = EXCLUDE,
    angle_k: int = typer.Option(512, min=1, help="Leading directions for angles; at most half the short side."),
    top: int = typer.Option(16, min=1, help="K: leading directions of the update."),
    hill_k: int = typer.Option(16, min=2, help="Singular values in the Hill estimate."),
    rank: int = typer.Option(64, min=1, help="Rank of the principal mask; at most a quarter of the short side."),
    alpha: float = typer.Option(0.3, min=0.001, max=0.999, help="Density of the principal and the low mask."),
    tolerance: float = typer.Option(1e-5, min=0.0, help="Of the |D| <= tolerance rule."),
    values: str = typer.Option("stored", help="stored, or bf16 to round everything first."),
    same_norm: bool = typer.Option(False, "--same-norm", help="Measure where each first had the norm of the smallest."),
    cache: Path = CACHE,
    trajectory: bool = TRAJECTORY,
    draws: int = typer.Option(4, min=0, help="Of each null of a trajectory."),
    threshold: float = typer.Option(0.9, min=0.0, max=1.0, help="Sim_K to the end of a locked subspace."),
    out: Path = typer.Option(None, help="Results; default geometry/NAME-KEY. The same command goes on where it ended."),
    png: bool = typer.Option(False, "--png", help="Draw the page's figures as OUT/figures/*.png too."),
    workers: int = typer.Option(None, min=1, help="Processes, one thread each; default: by cores and memory."),
    device: str = typer.Option("cpu", help="cpu, or cuda for the decompositions."),
    as_json: bool = typer.Option(False, "--json", help="Print choices and aggregates as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="Show no progress."),
) -> None:
    """Compare checkpoints with a start, matrix by matrix, without building a model.

    Given a single run, the start is the model it was trained from.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker a matrix, a thread a worker; before NumPy is loaded
    from statewise.geometry import Selection, Settings, prepare
    from statewise.geometry.matrices import parse_layers

    selection = Selection(tuple(modules.split(",")), parse_layers(layers), tuple(exclude))
    if trajectory:
        from statewise.cli.trajectory import command as follow

        return follow(checkpoints, selection, (top, hill_k, draws, threshold), out, workers, as_json, quiet)
    chosen = {"support": support, "update": update, "spectrum": spectrum, "angles": angles, "masks": masks}
    tiers = tuple(name for name, wanted in chosen.items() if wanted or everything) or ("support", "update")
    choices = (tolerance, top, hill_k, angle_k, rank, alpha, values, same_norm)
    comparison = prepare(_with_start(checkpoints), selection, Settings(tiers, *choices, cache and str(cache), device))
    target = out or Path("geometry") / f"{Path(comparison.labels[-1]).name}-{comparison.key}"
    rows = _run(comparison, target, workers, quiet)
    _print(comparison, rows, _drawn(comparison, rows, target, png), as_json)


def _drawn(comparison: Comparison, rows: list[dict[str, Any]], target: Path, png: bool) -> Path:
    from statewise.report.weights import write

    return write(comparison.facts(), rows, target, png)


def _run(comparison: Comparison, target: Path, workers: int | None, quiet: bool) -> list[dict[str, Any]]:
    from statewise.geometry import run

    count = _announce(comparison, target, workers, quiet)
    with Bar(quiet) as bar:
        try:
            return run(comparison, target, count, bar.update)
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; the same command goes on with what {target} holds.") from None


def _with_start(names: Sequence[str]) -> list[str]:
    """A run alone is compared with the model it was trained from."""
    if len(names) > 1 or not (Path(names[0]) / "run.json").is_file():
        return list(names)
    from statewise.run import RunDir

    recipe = RunDir.open(names[0]).recipe()
    if recipe.model.adapter is not None and recipe.model.adapter.path is not None:
        return [recipe.model.adapter.path, names[0]]
    return [recipe.model.path, names[0]]


def _announce(comparison: Comparison, target: Path, workers: int | None, quiet: bool) -> int:
    """Say what will be done and what it will take; returns the number of workers."""
    from statewise.geometry import plan
    from statewise.training.plan import free_bytes

    settings, matrices = comparison.settings, comparison.matrices
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    seconds = plan.seconds_by_tier(matrices, settings, len(comparison.labels))
    total = sum(seconds.values())
    # Starting a process takes seconds: not for work that takes less.
    count = workers or (plan.default_workers(matrices, settings, cores, free_bytes()) if total > 20 else 1)
    if quiet:
        return count
    say(f"{comparison.checkpoints[0].label} -> {', '.join(comparison.labels)}: {_size(comparison)} -> {target}")
    for note in comparison.notes:
        say(f"note: {note}")
    for tier, value in seconds.items():
        say(f"{tier}: about {plan.duration(value / count)} ({CHOICES[tier](settings)})")
    peak = plan.peak_bytes(matrices, settings) / 2**30
    say(f"{count} worker{'s' * (count > 1)} of one thread, about {peak:.1f} GiB each")
    if settings.cache:
        size = plan.cache_bytes(matrices, settings) / 2**30
        say(f"cache of W0: {size:.2f} GiB in {settings.cache}; where it is full and first order will do, much quicker")
    return count


def _size(comparison: Comparison) -> str:
    entries = sum(m.entries for m in comparison.matrices)
    return f"{len(comparison.matrices)} matrices, {entries:,} weights ({', '.join(comparison.selection.modules)})"


CHOICES = {
    "support": lambda s: f"equal bf16 codes; beside it |D| <= {s.tolerance:g}",
    "update": lambda s: f"K = {s.top}, Hill over {s.hill_k} singular values",
    "spectrum": lambda s: "all singular values, of W0 and W+ in float64, of D in float32",
    "angles": lambda s: f"k = {s.angle_k}, at most half the short side",
    "masks": lambda s: f"rank {s.rank}, at most a quarter of the short side; alpha = {s.alpha:g}",
}


class Bar:
    """A bar on a terminal, a line every few seconds elsewhere, both on stderr."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.last = quiet, 0.0
        self.bar: Any = None

    def __enter__(self) -> Bar:
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self.bar = Progress(console=Console(stderr=True), transient=True)
            self.bar.start()
            self.task = self.bar.add_task("matrices", total=None)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, done: int, total: int, name: str) -> None:
        import time

        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=total, description=name)
        elif not self.quiet and time.monotonic() - self.last > 5:
            self.last = time.monotonic()
            say(f"{done} of {total} matrices: {name}")


def _print(comparison: Comparison, rows: list[dict[str, Any]], page: Path, as_json: bool) -> None:
    from statewise.geometry.aggregate import aggregate

    found = aggregate(rows)
    if as_json:
        return print_json({**comparison.facts(), "page": page, "aggregates": found})
    columns = [pair for tier in comparison.settings.tiers for pair in SHOWN[tier]]
    columns = [pair for pair in columns if pair[1] in found[comparison.labels[0]]["all"]]
    for label, groups in found.items():
        print(f"\n{label}")
        table = [
            [group, kind, *(groups[group][name][kind] for _, name in columns)]
            for group in groups
            if group == "all" or group.startswith("module")
            for kind in (("mean", "weighted") if group == "all" else ("mean",))
        ]
        print_table(["matrices", "", *(heading for heading, _ in columns)], table)
    print(f"\nmean: over matrices; weighted: by parameters. {page} and, beside it, matrices.parquet and results.json")
