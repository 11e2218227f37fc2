"""A part of scored data: by bounds on phi, a quantile or a budget; in an order; with a record of the choice."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from statewise.component import build
from statewise.errors import DataError, RecipeError, RunError
from statewise.estimates import number
from statewise.files import atomic_write, to_json, written_aside
from statewise.onpolicy import fingerprint
from statewise.onpolicy.scoring import Scores
from statewise.settings import Settings
from statewise.sources.reading import Row, RowError, find_data

# {statistic: +1 where more is more on-policy, -1 where less}
ORDERS = {"mean_phi": 1, "z": 1, "min_phi": 1, "perplexity": -1, "num_tokens": -1}
# {part of a choice: (statistic, +1 for a lower bound, -1 for an upper one)}
BOUNDS = {
    "min_mean_phi": ("mean_phi", 1),
    "max_mean_phi": ("mean_phi", -1),
    "min_z": ("z", 1),
    "max_z": ("z", -1),
    "max_share_below": ("share_below", -1),
}
BATCH_ROWS = 1024  # of a Parquet file


class Choice(Settings):
    """Samples that hold to all bounds, then the part between the quantiles `quantiles` of `by` (0: lowest, 1: highest), then
    as many as the budget takes, the most on-policy by `by` first.

    mean phi in nats a token; max_share_below: of a sample's tokens with phi < `below`; max_tokens: response tokens.
    sort: "input" keeps the order; "easy_first" (the most on-policy by `by`) and "hard_first" make a curriculum.
    """

    min_mean_phi: float | None = None
    max_mean_phi: float | None = None
    min_z: float | None = None
    max_z: float | None = None
    max_share_below: float | None = Field(None, ge=0, le=1)
    below: float = -5.0
    quantiles: tuple[float, float] | None = None
    max_rows: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    by: Literal["mean_phi", "z", "min_phi", "perplexity", "num_tokens"] = "mean_phi"
    sort: Literal["input", "easy_first", "hard_first"] = "input"

    @model_validator(mode="after")
    def _chooses(self) -> Choice:
        if self.quantiles is not None and not 0 <= self.quantiles[0] < self.quantiles[1] <= 1:
            raise RecipeError(f"filter.quantiles: received {self.quantiles}, expected two shares, the lower first.")
        chosen = self.model_dump(exclude_defaults=True).keys() - {"below", "by"}
        if not chosen:
            raise RecipeError(
                "filter: nothing is chosen; give a bound (min_mean_phi, max_mean_phi, min_z, max_z, max_share_below), "
                "quantiles, a budget (max_rows, max_tokens) or an order (sort)."
            )
        return self


def filter_data(scores: str | Path | Scores, out: str | Path, **choice: Any) -> dict[str, Any]:
    """Write the rows that the choice (see `Choice`) keeps to `out` (.jsonl or .parquet), as they were in the input, and what
    was chosen and what that did to `out`.choice.json; returns the latter.

    Raises RecipeError for an output that exists or lies in the input, RunError where the input changed since it was scored,
    DataError where nothing is kept.
    """
    chosen: Choice = build(Choice, choice, "filter")
    found = scores if isinstance(scores, Scores) else Scores(scores)
    target = Path(out)
    _check_target(found, target)
    table = _read(found, chosen.below)
    kept, reasons = select(table, chosen)
    if not len(kept):
        raise DataError(
            f"{found.path}: the choice keeps none of {len(table['index'])} samples ({_words(reasons)}). "
            f"{_ranges(table, chosen, reasons)}"
        )
    record = {
        "scores": str(found.path),
        "data": found.settings.data.data,
        "model": found.settings.model.path,
        "choice": chosen.model_dump(mode="json", exclude_none=True),
        "before": _effect(table, np.arange(len(table["index"]))),
        "after": _effect(table, kept),
        "left_out": reasons,
        "bad_rows": sum(kind["rows"] for kind in found.bad_rows().values()),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(target) as aside:
        _write(_rows_of(found, table["index"][kept]), aside, target.suffix)
        atomic_write(record_file(target), to_json(record, indent=2) + "\n")  # where the rows are, their record is
    return record


def record_file(target: Path) -> Path:
    return target.with_name(target.name + ".choice.json")


def _check_target(scores: Scores, target: Path) -> None:
    if target.suffix not in (".jsonl", ".parquet"):
        raise RecipeError(f"{target}: expected a name that ends in .jsonl or .parquet.")
    if target.exists():
        raise RecipeError(f"{target}: exists; choose another output.")
    source = scores.settings.data
    path = None if source.data.startswith("tiny:") else find_data(source.data, scores.base_dir)
    if path is not None and path.is_dir() and path.resolve() in target.resolve().parents:
        raise RecipeError(f"{target}: lies in the input {path}, whose rows it would join; choose another output.")
    changed = fingerprint.differences(scores.data_files, fingerprint.of_data(source, scores.base_dir))
    if changed:
        raise RunError(
            f"{scores.path}: the data changed since they were scored: {'; '.join(changed[:3])}. Score them again."
        )


def _read(scores: Scores, below: float) -> dict[str, np.ndarray]:
    """{column: [samples]}, with the share of tokens below a bound as `share_below`."""
    names = ("index", "sum_phi", *ORDERS)
    columns: dict[str, list[np.ndarray]] = {name: [] for name in (*names, "share_below")}
    for batch in scores.batches(*names, "phi"):
        for name in names:
            columns[name].append(batch[name])
        columns["share_below"].append(np.array([(phi < below).mean() for phi in batch["phi"]]))
    return {name: np.concatenate(values) for name, values in columns.items()}


def select(table: Mapping[str, np.ndarray], choice: Choice) -> tuple[np.ndarray, dict[str, int]]:
    """Places of the samples that are kept, in the order of the output, and how many each part of the choice left out."""
    rank = ORDERS[choice.by] * np.nan_to_num(table[choice.by].astype(np.float64))
    kept = np.arange(len(rank))
    reasons: dict[str, int] = {}

    def keep(name: str, inside: np.ndarray) -> None:
        nonlocal kept
        reasons[name] = int((~inside).sum())
        kept = kept[inside]

    for name, (column, sign) in BOUNDS.items():
        bound = getattr(choice, name)
        if bound is not None:
            keep(name, sign * np.nan_to_num(table[column][kept]) >= sign * bound)
    if choice.quantiles is not None:
        order = np.argsort(np.argsort(rank[kept], kind="stable"), kind="stable")
        low, high = (math.floor(q * len(kept) + 0.5) for q in choice.quantiles)
        keep("quantiles", (order >= low) & (order < high))
    best = kept[np.argsort(-rank[kept], kind="stable")]
    for name, costs in (("max_rows", np.ones(len(best))), ("max_tokens", table["num_tokens"][best])):
        budget = getattr(choice, name)
        if budget is not None:
            inside = set(best[: int((np.cumsum(costs[: len(best)]) <= budget).sum())].tolist())
            keep(name, np.array([place in inside for place in kept.tolist()], dtype=bool))
            best = best[: len(kept)]
    if choice.sort == "input":
        return kept, reasons
    return kept[np.argsort((-1 if choice.sort == "easy_first" else 1) * rank[kept], kind="stable")], reasons


def _effect(table: Mapping[str, np.ndarray], places: np.ndarray) -> dict[str, float]:
    tokens = int(table["num_tokens"][places].sum())
    return {
        "rows": len(places),
        "tokens": tokens,
        "mean_phi": float(table["sum_phi"][places].sum()) / tokens,
        "sample_mean_phi": float(table["mean_phi"][places].mean()),
        "share_below": float(table["share_below"][places] @ table["num_tokens"][places]) / tokens,
    }


def _words(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{name} left out {count}" for name, count in reasons.items())


def _ranges(table: Mapping[str, np.ndarray], choice: Choice, reasons: Mapping[str, int]) -> str:
    """`mean_phi: min -2.1, median -0.4, max 0.1` of all samples, of each statistic by which some were left out."""
    others = {"quantiles": choice.by, "max_rows": choice.by, "max_tokens": "num_tokens"}
    parts = {name: BOUNDS[name][0] if name in BOUNDS else others[name] for name, count in reasons.items() if count}
    told = []
    for column in dict.fromkeys(parts.values()):
        low, median, high = (number(float(x)) for x in np.quantile(np.nan_to_num(table[column]), (0, 0.5, 1)))
        told.append(f"{column}: min {low}, median {median}, max {high}")
    return f"Choose by the values of all samples: {'; '.join(told)}."


def _rows_of(scores: Scores, numbers: np.ndarray) -> Iterator[Row]:
    """The rows of these numbers in their order; out of the input's order they pass through a temporary file."""
    wanted = set(numbers.tolist())
    rows = ((i, row) for i, (_, row) in enumerate(scores.settings.data.stream(scores.base_dir)) if i in wanted)
    if (np.diff(numbers) > 0).all():
        yield from (_sound(row) for _, row in rows)
        return
    with tempfile.TemporaryFile() as file:
        places: dict[int, int] = {}
        for index, row in rows:
            places[index] = file.tell()
            file.write((to_json(_sound(row)) + "\n").encode())
        for number in numbers.tolist():
            file.seek(places[number])
            yield json.loads(file.readline())


def _sound(row: Row | RowError) -> Row:
    if isinstance(row, RowError):
        raise row
    return row


def _write(rows: Iterable[Row], file: Path, suffix: str) -> None:
    if suffix == ".parquet":
        return _write_parquet(rows, file)
    with file.open("w", encoding="utf-8") as lines:
        lines.writelines(to_json(row) + "\n" for row in rows)


def _write_parquet(rows: Iterable[Row], target: Path) -> None:
    """Columns and their types are those of the first rows."""
    import pyarrow
    from pyarrow import parquet

    source = iter(rows)
    writer: Any = None
    try:
        while part := [row for _, row in zip(range(BATCH_ROWS), source, strict=False)]:
            table = pyarrow.Table.from_pylist(part, schema=writer.schema if writer else None)
            writer = writer or parquet.ParquetWriter(target, table.schema, compression="zstd")
            writer.write_table(table)
    except pyarrow.ArrowException as error:
        raise DataError(f"--out: the rows have no common columns ({error}); write .jsonl instead.") from None
    finally:
        if writer is not None:
            writer.close()
