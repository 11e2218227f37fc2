"""Comparing checkpoints matrix by matrix: a worker a matrix, results kept as they come, so that a killed one goes on.

OUT/geometry.json      what is compared, and with which choices
OUT/parts/*.parquet    a file a matrix, written whole; those that are there are not computed again
OUT/matrices.parquet   a row a matrix and checkpoint, curves included
OUT/results.json       choices, notes, aggregates, and the rows without curves
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from statewise.errors import CheckpointError, RunError
from statewise.files import atomic_write, is_unused, to_json
from statewise.geometry.aggregate import Row, aggregate
from statewise.geometry.checkpoints import Checkpoint, open_checkpoint
from statewise.geometry.matrices import Matrix, Selection, match
from statewise.geometry.measure import Measured, measure
from statewise.geometry.nulls import gate_jaccard
from statewise.geometry.origin import Origin, Settings
from statewise.geometry.place import Place, at_one_norm, ends
from statewise.geometry.table import parquet, read_parquet
from statewise.geometry.workers import each
from statewise.stats.spectra import subspace_similarity

SCHEMA = 1
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Comparison:
    """What is compared, checked and named. `labels`: of the checkpoints after the first; `places`: where they are measured."""

    checkpoints: tuple[Checkpoint, ...]
    matrices: tuple[Matrix, ...]
    notes: tuple[str, ...]
    selection: Selection
    settings: Settings
    places: tuple[Place, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(c.label for c in self.checkpoints[1:])

    @property
    def key(self) -> str:
        """Of the files, the selection and the settings that make the numbers; where the cache lies does not."""
        settings = {**asdict(self.settings), "cache": self.settings.cache is not None}
        between = [c for place in self.places if place.share != 1 for c in (place.before, place.after)]
        files = [checkpoint.fingerprint for checkpoint in (*self.checkpoints, *between)]
        return sha256(to_json([SCHEMA, files, asdict(self.selection), settings]).encode()).hexdigest()[:12]

    def facts(self) -> dict[str, Any]:
        settings = {name: value for name, value in asdict(self.settings).items() if name not in ("cache", "device")}
        return {
            "schema": SCHEMA,
            "key": self.key,
            "before": self.checkpoints[0].label,
            "after": list(self.labels),
            "places": [place.facts() for place in self.places],
            "selection": asdict(self.selection),
            "settings": settings,
            "num_matrices": len(self.matrices),
            "num_entries": sum(m.entries for m in self.matrices),
            "notes": list(self.notes),
        }


def prepare(names: Sequence[str | Path], selection: Selection, settings: Settings) -> Comparison:
    """Open and match the checkpoints, the first one the start. Raises CheckpointError."""
    if len(names) < 2:
        raise CheckpointError(f"received {len(names)} checkpoint, expected a start and at least one end.")
    checkpoints = tuple(open_checkpoint(name) for name in names)
    labels = [c.label for c in checkpoints[1:]]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise CheckpointError(f"{twice}: is given twice among the ends; give each once.")
    found = match(checkpoints, selection)
    notes = [*found.notes, *_rounding(checkpoints, settings)]
    places = ends(checkpoints)
    if settings.same_norm:
        places, norms = at_one_norm(checkpoints, found.matrices, selection)
        notes += norms
    return Comparison(checkpoints, tuple(found.matrices), tuple(notes), selection, settings, places)


def _rounding(checkpoints: Sequence[Checkpoint], settings: Settings) -> Iterator[str]:
    """What is not stored in bf16, and what is done about it."""
    for checkpoint in checkpoints:
        others = sorted({t.dtype for t in checkpoint.tensors.values() if len(t.shape) == 2} - {"BF16"})
        kind = "an adapter" if checkpoint.base is not None else " and ".join(others)
        if checkpoint.base is None and not others:
            continue
        if settings.values == "bf16":
            yield f"{checkpoint.label} is {kind}: rounded to bf16 for everything"
        else:
            yield f"{checkpoint.label} is {kind}: rounded to bf16 for support and masks, exact for the rest"


def run(
    comparison: Comparison, out: str | Path | None = None, workers: int = 1, progress: Progress | None = None
) -> list[Row]:
    """The rows of all matrices and checkpoints, in order; kept and written under `out` where it is given.

    Raises RunError where `out` holds another comparison, CheckpointError where a matrix can't be measured.
    """
    parts = _open(comparison, Path(out)) if out is not None else None
    done: dict[int, list[Row]] = {}
    for index in range(len(comparison.matrices)) if parts is not None else ():
        file = _part(parts, comparison, index)
        if file.is_file():
            done[index] = read_parquet(file)
    left = [index for index in range(len(comparison.matrices)) if index not in done]
    tell = progress or (lambda count, total, name: None)
    for index, rows in each(measure_matrix, comparison, left, workers):
        done[index] = rows
        if parts is not None:
            atomic_write(_part(parts, comparison, index), parquet(rows))
        tell(len(done), len(comparison.matrices), comparison.matrices[index].name)
    rows = [row for index in sorted(done) for row in done[index]]
    if out is not None:
        _write(comparison, rows, Path(out))
    return rows


def _open(comparison: Comparison, out: Path) -> Path:
    """Make or reopen the directory; returns that of the parts."""
    file = out / "geometry.json"
    if file.is_file():
        known = json.loads(file.read_text(encoding="utf-8")).get("key")
        if known != comparison.key:
            raise RunError(
                f"{out}: holds another comparison (or its checkpoints have changed since); choose another --out, or "
                "remove it."
            )
    elif not is_unused(out):
        raise RunError(f"{out}: is not empty and holds no comparison; choose another --out.")
    (out / "parts").mkdir(parents=True, exist_ok=True)
    atomic_write(file, to_json(comparison.facts(), indent=2) + "\n")
    return out / "parts"


def _part(parts: Path | None, comparison: Comparison, index: int) -> Path:
    assert parts is not None
    return parts / f"{index:04d}_{re.sub(r'[^A-Za-z0-9.-]', '_', comparison.matrices[index].name)}.parquet"


def measure_matrix(comparison: Comparison, index: int) -> list[Row]:
    """The rows of one matrix, one for each checkpoint; what they share of W0 is computed once."""
    matrix = comparison.matrices[index]
    try:
        origin = Origin(matrix, matrix.of(comparison.checkpoints[0]), comparison.settings)
        found = [_lean(measure(origin, place.of(matrix))) for place in comparison.places]
    except ArithmeticError as error:
        raise CheckpointError(f"{matrix.name}: {error}; count them with --support alone, or --exclude it.") from None
    rows = [{"checkpoint": name, **measured.row} for name, measured in zip(comparison.labels, found, strict=True)]
    if len(found) > 1:
        for row, measured in zip(rows, found, strict=True):
            row |= _against_each(measured, found, origin)
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def _lean(measured: Measured) -> Measured:
    """With the changed mask as bits: an eighth of its size while the other checkpoints are measured."""
    packed = None if measured.moved is None else np.packbits(measured.moved)
    return Measured(measured.row, packed, measured.leading, measured.gate)


def _against_each(one: Measured, others: Sequence[Measured], origin: Origin) -> dict[str, list[float]]:
    """Lists over the checkpoints: Sim_K of the updates, Jaccard index of the changed masks beside its two nulls."""
    found: dict[str, list[float]] = {}
    if one.moved is not None:
        pairs = [_jaccard(one, other, origin.matrix.entries) for other in others]
        found |= {"jaccard": [p[0] for p in pairs], "jaccard_independent": [p[1] for p in pairs]}
    if one.gate is not None:
        expected = (gate_jaccard(origin.counts, one.gate, o.gate) if o.gate else float("nan") for o in others)
        found["jaccard_gate"] = list(expected)
    if one.leading is not None:
        k = origin.settings.top
        found["similarity"] = [
            subspace_similarity(one.leading.v[:, :k], o.leading.v[:, :k]) if o.leading else float("nan") for o in others
        ]
    return found


def _jaccard(a: Measured, b: Measured, entries: int) -> tuple[float, float]:
    from statewise.geometry.masks import independent_jaccard

    assert a.moved is not None and b.moved is not None
    both, union = (int(np.bitwise_count(x).sum()) for x in (a.moved & b.moved, a.moved | b.moved))
    p, q = (x.row["changed"] / entries for x in (a, b))
    return both / union if union else float("nan"), independent_jaccard(p, q)


def _write(comparison: Comparison, rows: Sequence[Row], out: Path) -> None:
    """The results; how long they took is kept apart, so that the same comparison gives the same bytes."""
    timings = [name for name in rows[0] if name.startswith("seconds_")]
    rows = [{k: v for k, v in row.items() if k not in timings} for row in rows]
    atomic_write(out / "matrices.parquet", parquet(rows))
    plain = [{k: v for k, v in row.items() if not isinstance(v, list)} for row in rows]
    content = {**comparison.facts(), "aggregates": aggregate(rows), "matrices": plain}
    atomic_write(out / "results.json", to_json(content, indent=1) + "\n")
