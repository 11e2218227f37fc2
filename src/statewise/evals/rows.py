"""Where a task's examples come from, and which of them are used."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from statewise.component import Task
from statewise.errors import DataError, nearest
from statewise.types import derive_seed

if TYPE_CHECKING:
    from statewise.types import EvalContext

Row = Mapping[str, Any]
Purpose = Literal["target", "retention", "probe"]


class RowsTask(Task):
    """A task over rows. `name`: what results are filed under (default: the kind). `limit`: use that many rows.

    purpose: what the score says in the ledger: what is trained for ("target"), what should be kept ("retention"), or how far
    held-out text drifted ("probe").
    """

    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    usual_purpose: ClassVar[Purpose] = "retention"

    name: str | None = None
    limit: int | None = Field(None, ge=1)
    purpose: Purpose | None = None

    @property
    def is_random(self) -> bool:
        """Whether the records depend on the seed of the evaluation."""
        return True

    @abstractmethod
    def rows(self, context: EvalContext) -> Sequence[Row]:
        """All rows, with the columns that `run` reads."""

    def check_row(self, row: Row) -> None:
        """Raises DataError where `run` could not use the row."""

    def chosen(self, context: EvalContext) -> list[tuple[str, Row]]:
        """(id, row) of the rows that are used: the same for every model and seed, so that scores can be paired."""
        rows = self.rows(context)
        ids = _ids(rows)
        limit = self.limit if self.limit is not None else context.limit
        order = list(range(len(rows)))
        if limit is not None and limit < len(rows):
            Random(derive_seed(0, "eval", self.kind, len(rows))).shuffle(order)
            order = sorted(order[:limit])
        return [(ids[i], rows[i]) for i in order]

    def extra(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Further metrics of all records, by name."""
        return {}


class FileTask(RowsTask):
    """Rows of a file, a directory or a hub id. `columns`: {name that the task reads: name in the data}."""

    data: str
    config: str | None = None
    split: str = "test"
    columns: dict[str, str] = {}

    def rows(self, context: EvalContext) -> Sequence[Row]:
        from statewise.sources.reading import read_rows

        found = read_rows(self.data, base_dir=context.base_dir, config=self.config, split=self.split)
        rows = []
        for place, row in zip(found.places, found.rows, strict=True):
            try:
                rows.append(self.prepare(self.renamed(row)))
            except DataError as error:
                raise DataError(f"{place}: {error}") from None
        return rows

    def check_files(self, base_dir: Path) -> None:
        """Raises DataError where the data are local and not there, or where the first row has not what is read.

        Data of the hub are left to their loading.
        """
        from statewise.sources.reading import RowError, find_data, stream_rows

        super().check_files(base_dir)
        if self.data.startswith("tiny:") or find_data(self.data, base_dir) is None:
            return
        first = next(stream_rows(self.data, base_dir=base_dir, config=self.config, split=self.split), None)
        if first is None:
            raise DataError(f"{self.data}: holds no rows.")
        place, row = first
        try:
            if isinstance(row, RowError):
                raise row
            self.check_row(self.prepare(self.renamed(row)))
        except DataError as error:
            raise DataError(f"{place}: {error}") from None

    def renamed(self, row: Row) -> Row:
        """The row with `columns` applied; what the task does not read keeps its name."""
        missing = [column for column in self.columns.values() if column not in row]
        if missing:
            raise DataError(f"no column '{missing[0]}', which `columns` names{nearest(missing[0], row)}")
        return {**row, **{name: row[column] for name, column in self.columns.items()}}

    def prepare(self, row: Row) -> Row:
        """The row as `run` wants it; benchmarks with a layout of their own override this."""
        return row

    def field(self, row: Row, name: str) -> Any:
        """A column that the task needs. Raises DataError that says which there are."""
        if row.get(name) is None:
            raise DataError(
                f"no '{name}', which task '{self.kind}' reads; the row has {', '.join(row)}. Say which column "
                f'it is with columns = {{ "{name}" = "..." }}.'
            )
        return row[name]


class TinyTask(RowsTask):
    """Rows of an embedded task: the first `count` of the stream that `seed` names."""

    count: int = Field(400, ge=1)
    split: str = "test"
    seed: int = 0

    def rows(self, context: EvalContext) -> Sequence[Row]:
        from statewise.sources.reading import read_rows

        return read_rows(self.kind, split=self.split, tiny=self.settings()).rows

    def settings(self) -> dict[str, Any]:
        """What the rows are made from."""
        return {"count": self.count, "seed": self.seed}


def _ids(rows: Sequence[Row]) -> list[str]:
    """The rows' own ids where all have different ones, else their numbers, counted from 0."""
    own = [row.get("id") for row in rows]
    if None not in own and len(set(map(str, own))) == len(rows):
        return [str(name) for name in own]
    return [str(index) for index in range(len(rows))]
