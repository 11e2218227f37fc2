"""`statewise eval`: any model or run on any tasks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from statewise.cli.output import interval, print_json, print_table, say
from statewise.errors import CheckpointError, RecipeError

REPORT_SECONDS = 5.0


def command(
    model: str = typer.Argument(None, help="tiny, a directory, a hub id, or a run directory (its last checkpoint)."),
    named: str = typer.Option(None, "--model", help="The model, by name."),
    task: list[str] = typer.Option([], help="KIND or KIND:key=value,key=value; may be given several times."),
    tasks: Path = typer.Option(None, help="A TOML file with a list `tasks`."),
    adapter: str = typer.Option(None, help="A PEFT adapter on the model."),
    plugin: list[str] = typer.Option([], help="A file or module with tasks of your own."),
    out: Path = typer.Option(None, help="Directory for per-example records."),
    limit: int = typer.Option(None, min=1, help="At most this many examples a task."),
    seed: int = typer.Option(0, help="Of sampled answers."),
    device: str = typer.Option(None, help="cpu, cuda, cuda:1 ...; default: cuda where there is one."),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16 or float16."),
    as_json: bool = typer.Option(False, "--json", help="Print the results as JSON."),
) -> None:
    """Evaluate a model or a run, a run on its recipe's own tasks where none is named.

    Prints means with 95 % intervals; --out keeps a record for every example.
    """
    if (model is None) == (named is None):
        raise RecipeError(
            f"eval: received {[m for m in (model, named) if m]}, expected one model, such as `eval tiny`."
        )
    model = model or named
    chosen, base_dir = _tasks(task, tasks, plugin, Path(model))
    say(f"evaluating {model} on {', '.join(getattr(t, 'name', None) or t.kind for t in chosen)}")
    policy = _load(model, adapter, dtype, device)
    from statewise import evals

    results = evals.run(policy, chosen, out=out, seed=seed, limit=limit, base_dir=base_dir, progress=_reporter())
    if as_json:
        return print_json({name: result.summary() for name, result in results.items()})
    rows = [
        [name, r.metric, r.n, interval({"mean": r.mean, "low": r.low, "high": r.high})] for name, r in results.items()
    ]
    print_table(["task", "metric", "n", "mean [95 %]"], rows)


def _tasks(texts: list[str], file: Path | None, plugins: list[str], model: Path) -> tuple[list[Any], Path]:
    """What is asked, and where its files are: the tasks named, else those of a run's own recipe."""
    from statewise.cli.words import parse_task, read_tasks
    from statewise.component import load_plugin
    from statewise.run import RunDir

    for name in plugins:
        load_plugin(name)
    chosen = [*(parse_task(text) for text in texts), *(read_tasks(file) if file is not None else ())]
    if chosen:
        return chosen, Path(".")
    recipe = RunDir.open(model).recipe() if (model / "run.json").is_file() else None
    if recipe is None or not recipe.eval.tasks:
        raise RecipeError("eval: no task is named; give --task KIND (such as tiny:math) or --tasks FILE.toml.")
    return list(recipe.eval.tasks), recipe.base_dir


def _load(model: str, adapter: str | None, dtype: str, device: str | None) -> Any:
    from statewise.component import build
    from statewise.settings import ModelSettings

    path = _checkpoint(Path(model)) if (Path(model) / "run.json").is_file() else model
    plain: dict[str, Any] = {"path": str(path), "dtype": dtype, "adapter": {"path": adapter} if adapter else None}
    settings = build(ModelSettings, plain, "model")
    import torch

    from statewise.models.load import load_policy
    from statewise.training.progress import hide_library_noise

    hide_library_noise()
    return load_policy(settings, device=device or ("cuda" if torch.cuda.is_available() else None))


def _checkpoint(path: Path) -> Path:
    from statewise.training.checkpoint import latest_valid

    found = latest_valid(path, say)
    if found is None:
        raise CheckpointError(f"{path}: has no valid checkpoint; train it first, or name a checkpoint directory.")
    return found


def _reporter() -> Callable[[str, int, int], None]:
    """Says how far a task is, every few seconds."""
    last = time.monotonic()

    def report(name: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= REPORT_SECONDS:
            last = time.monotonic()
            say(f"{name}: {done} of {total}")

    return report
