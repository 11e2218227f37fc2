"""Evaluation: a model on tasks, with a record for every example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statewise.component import Component, Task, parse
from statewise.errors import RecipeError
from statewise.evals.results import TaskResult, file_name, summarise, task_name, write_records, write_summary
from statewise.types import EvalContext, Sampler, Scorer

if TYPE_CHECKING:
    from statewise.evals.cache import ScoreCache

__all__ = ["TaskResult", "run"]

Progress = Callable[[str, int, int], None]


def run(
    model: Any,
    tasks: Sequence[str | Component | dict[str, Any]],
    *,
    tokenizer: Any = None,
    out: str | Path | None = None,
    seed: int = 0,
    limit: int | None = None,
    sampler: Sampler | None = None,
    scorer: Scorer | None = None,
    batch_tokens: int = 8192,
    base_dir: Path = Path("."),
    progress: Progress | None = None,
    cache: ScoreCache | None = None,
) -> dict[str, TaskResult]:
    """Results by task name.

    model: a transformers or PEFT model (then `tokenizer` is needed), a LoadedPolicy, or where to load one: "tiny",
    a directory, a hub id.
    tasks: kinds, tasks, or tables with a kind.
    out: a directory for `<task>.jsonl` and `summary.json`.
    seed: of sampled answers; which examples are used does not depend on it.
    limit: at most this many examples, for tasks without a limit of their own.
    sampler, scorer: engines to use instead of those in process.
    progress: called with task name, done, total.
    cache: scores of this very model, measured before.

    Raises RecipeError for what is no task and for two tasks of one name, DataError where data can't be used.
    """
    chosen = parsed(tasks)
    for task in chosen:
        task.check_files(base_dir)
    opened, tokenizer = _open(model, tokenizer)
    directory = None if out is None else Path(out)
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    results: dict[str, TaskResult] = {}
    with _opened(opened, tokenizer, sampler, scorer, batch_tokens) as engines:
        context = EvalContext(*engines, seed=seed, batch_tokens=batch_tokens, base_dir=base_dir, limit=limit)
        for task in chosen:
            result = _evaluate(task, context, progress, cache)
            results[result.name] = result
            if directory is not None:
                write_records(directory, result)
    if directory is not None:
        settings = [{**task.to_plain(), "name": task_name(task)} for task in chosen]
        write_summary(directory, results, {"seed": seed, "limit": limit, "settings": settings})
    return results


def parsed(tasks: Sequence[str | Component | dict[str, Any]]) -> list[Task]:
    """The tasks, which have files of their own each. Raises RecipeError."""
    chosen: list[Task] = [parse("task", item, f"tasks[{i}]") for i, item in enumerate(tasks)]  # type: ignore[misc]
    files: dict[str, str] = {}
    for task in chosen:
        name = task_name(task)
        if file_name(name) in files:
            raise RecipeError(
                f"tasks: two are called '{name}' (file {file_name(name)}.jsonl); give one of them another `name`."
            )
        files[file_name(name)] = name
    return chosen


def _open(model: Any, tokenizer: Any) -> tuple[Any, Any]:
    from statewise.models.load import LoadedPolicy, load_policy

    if isinstance(model, str | Path):
        import torch

        model = load_policy(str(model), device="cuda" if torch.cuda.is_available() else None)
    if isinstance(model, LoadedPolicy):
        return model.model, tokenizer or model.tokenizer
    if tokenizer is None:
        raise RecipeError(
            f"tokenizer: received none with a {type(model).__name__}; give its tokenizer, or a LoadedPolicy or a path."
        )
    return model, tokenizer


@contextmanager
def _opened(
    model: Any, tokenizer: Any, sampler: Sampler | None, scorer: Scorer | None, batch_tokens: int
) -> Iterator[tuple[Any, Any, Sampler, Scorer]]:
    """Model, tokenizer and engines, while the model is in eval mode."""
    from statewise.models.answers import AnswerScorer
    from statewise.models.batching import evaluating
    from statewise.models.generate import InProcessSampler
    from statewise.models.load import pad_id

    pad = pad_id(tokenizer)
    sampler = sampler or InProcessSampler(model, pad_id=pad, batch_tokens=batch_tokens)
    scorer = scorer or AnswerScorer(model, pad_id=pad, batch_tokens=batch_tokens)
    with evaluating(model):
        yield model, tokenizer, sampler, scorer


def _evaluate(task: Task, context: EvalContext, progress: Progress | None, cache: ScoreCache | None) -> TaskResult:
    if cache is None:
        return _measured(task, context, progress)
    key = cache.key(task, seed=context.seed, limit=context.limit, base_dir=context.base_dir)
    known = cache.find(key)
    if known is None:
        known = _measured(task, context, progress)
        cache.keep(key, known)
    return known


def _measured(task: Task, context: EvalContext, progress: Progress | None) -> TaskResult:
    if progress is not None:
        report = partial(progress, task_name(task))
        if hasattr(context.sampler, "progress"):  # an engine that can tell how far it is
            context.sampler.progress = report
        context = replace(context, progress=report)
    return summarise(task, task.run(context))
