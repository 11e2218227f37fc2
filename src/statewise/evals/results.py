"""What an evaluation gives: means with intervals, and a record for every example."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from statewise.component import Task
from statewise.errors import DataError, RecipeError
from statewise.files import atomic_write, to_json

Record = Mapping[str, Any]


@dataclass(frozen=True)
class TaskResult:
    """A task's outcome: the mean score with its standard error and 95 % interval, over `n` examples.

    The interval is Wilson's where all scores are 0 or 1, else Student's; examples are the units, however many samples
    each has. `extra`: further metrics by name. `records`: one an example, with `id` and `score`.
    """

    name: str
    metric: str
    n: int
    mean: float
    se: float
    low: float
    high: float
    higher_is_better: bool = True
    extra: dict[str, float] = field(default_factory=dict)
    records: tuple[Record, ...] = ()
    purpose: str = "retention"

    def summary(self) -> dict[str, Any]:
        """All but the records."""
        return {name: value for name, value in vars(self).items() if name != "records"}


def task_name(task: Task) -> str:
    """What the task's results are filed under."""
    return getattr(task, "name", None) or task.kind


def summarise(task: Task, records: Sequence[Record]) -> TaskResult:
    """The result of a task's records. Raises RecipeError where a record lacks what every record has."""
    from statewise.stats.hypothesis import mean_interval, mean_se, wilson

    name = task_name(task)
    _check(name, records)
    scores = [float(r["score"]) for r in records]
    weights = [float(r.get("weight", 1.0)) for r in records]
    mean, se = mean_se(scores, weights)
    if set(scores) <= {0.0, 1.0} and len(set(weights)) == 1:
        low, high = wilson(int(sum(scores)), len(scores))
    else:
        low, high = mean_interval(scores, weights=weights)
    extra = task.extra(records) if hasattr(task, "extra") else {}
    metric, better = getattr(task, "metric", "score"), getattr(task, "higher_is_better", True)
    purpose = str(getattr(task, "purpose", None) or getattr(task, "usual_purpose", "retention"))
    return TaskResult(name, metric, len(scores), mean, se, low, high, better, extra, tuple(records), purpose)


def _check(name: str, records: Sequence[Record]) -> None:
    if not records:
        raise RecipeError(f"task '{name}': gave no record; expected at least one example. Is its data empty?")
    ids = set()
    for index, record in enumerate(records):
        score = record.get("score")
        if "id" not in record or not isinstance(score, int | float) or not math.isfinite(score):
            raise RecipeError(
                f"task '{name}', record {index}: received id {record.get('id')!r} and score {score!r}; expected an id "
                "and a finite number."
            )
        if record["id"] in ids:
            raise RecipeError(f"task '{name}': two records have the id {record['id']!r}; expected different ones.")
        ids.add(record["id"])


def write_records(directory: Path, result: TaskResult) -> None:
    """`<task>.jsonl`, whole or not at all."""
    lines = (to_json(dict(record)) + "\n" for record in result.records)
    atomic_write(directory / f"{file_name(result.name)}.jsonl", _safe("".join(lines)))


def write_summary(directory: Path, results: Mapping[str, TaskResult], facts: Mapping[str, Any]) -> None:
    """`summary.json`: the facts of the evaluation and each task's result."""
    content = {**facts, "tasks": {name: result.summary() for name, result in results.items()}}
    atomic_write(directory / "summary.json", _safe(to_json(content, indent=2) + "\n"))


def read_results(directory: Path) -> dict[str, TaskResult]:
    """The results by task name that `evals.run(out=directory)` wrote. Raises DataError naming file and line."""
    file = directory / "summary.json"
    try:
        told = json.loads(file.read_text(encoding="utf-8"))["tasks"]
        files = {name: directory / f"{file_name(name)}.jsonl" for name in told}
        return {name: from_plain({**told[name], "records": list(_records(file))}) for name, file in files.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{file}: can't be read as an evaluation ({error!r}); expected what `statewise eval --out` or a run wrote."
        ) from None


def from_plain(plain: Mapping[str, Any]) -> TaskResult:
    """The result whose fields, as JSON holds them, are given."""
    known = {f.name for f in fields(TaskResult)}
    numbers = {name: math.nan for name in ("se", "low", "high") if plain.get(name) is None}  # JSON has no NaN
    kept = {name: value for name, value in plain.items() if name in known} | numbers
    return TaskResult(**{**kept, "records": tuple(plain["records"])})


def _records(file: Path) -> Iterator[Record]:
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        if line:
            try:
                record = json.loads(line)
                float(record["score"]), record["id"]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{file}:{number}: is no record with id and score: {error!r}") from None
            yield record


def file_name(task: str) -> str:
    """The task's name with only letters, digits, ".", "_" and "-"."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", task)


def _safe(text: str) -> bytes:
    """UTF-8; half a surrogate pair, which UTF-8 can't hold, stays as the JSON escape that it came from."""
    return text.encode("utf-8", "backslashreplace")
