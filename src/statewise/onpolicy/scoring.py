"""A data set scored into a directory, in chunks: a killed scoring goes on where it was, to the same bytes.

manifest.json     what the scores depend on: data, model, settings, with hashes
parts/            finished chunks, until all are there
scores.parquet    a row a sample, see `records`
summary.json      the data set in numbers;  bad_rows.jsonl: rows that were left out, where there are any
report.html       the same for people
run.json          time, tokens a second, versions, machine
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from statewise import environment
from statewise.component import build
from statewise.errors import DataError, RunError
from statewise.files import atomic_write, is_unused, to_json
from statewise.onpolicy import fingerprint, records
from statewise.onpolicy.chunks import Numbered, open_encoder, opened_model, read_chunks
from statewise.onpolicy.meter import Meter
from statewise.onpolicy.settings import Engine, ScoreSettings
from statewise.onpolicy.workers import scored
from statewise.run import RunDir
from statewise.sources.reading import SHOWN_PLACES

SCHEMA = 1


class Scores:
    """A directory that holds scored data."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        for name in ("manifest.json", "scores.parquet", "summary.json"):
            if not (self.path / name).is_file():
                raise RunError(
                    f"{path}: has no {name}, so it holds no finished scores; give what `score --out` wrote, or run the same "
                    "command again where it was cut short."
                )

    @property
    def file(self) -> Path:
        return self.path / "scores.parquet"

    @property
    def summary(self) -> dict[str, Any]:
        return _read(self.path / "summary.json")

    @property
    def settings(self) -> ScoreSettings:
        settings: ScoreSettings = build(ScoreSettings, _read(self.path / "manifest.json")["settings"], "manifest")
        return settings

    @property
    def base_dir(self) -> Path:
        """Where the data's relative path starts."""
        return Path(_read(self.path / "manifest.json")["base_dir"])

    @property
    def data_files(self) -> dict[str, str]:
        """{file: hash} of the data that were scored."""
        files: dict[str, str] = _read(self.path / "manifest.json")["data_files"]
        return files

    @property
    def model_files(self) -> dict[str, str]:
        """{file: hash} of the model that scored."""
        files: dict[str, str] = _read(self.path / "manifest.json")["model_files"]
        return files

    def bad_rows(self) -> dict[str, Any]:
        """{reason: {"rows": number, "first": places}} of the rows that were left out."""
        file = self.path / "bad_rows.jsonl"
        found: dict[str, Any] = {}
        if not file.is_file():
            return found
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                kind = found.setdefault(row["reason"], {"rows": 0, "first": []})
                kind["rows"] += 1
                kind["first"] += [row["place"]] if len(kind["first"]) < SHOWN_PLACES else []
        return found

    def batches(self, *columns: str) -> Iterator[dict[str, Any]]:
        """{column: values} of some samples at a time, in the order of the input."""
        return records.batches(self.file, columns)


def is_scores(path: Path) -> bool:
    """Whether scoring wrote, or began to write, this directory."""
    return (path / "manifest.json").is_file()


def score(
    data: str | dict[str, Any] | ScoreSettings,
    model: str | dict[str, Any] = "tiny",
    *,
    out: str | Path,
    engine: Engine | None = None,
    base_dir: str | Path = ".",
    meter: Meter | None = None,
    **settings: Any,
) -> Scores:
    """phi, log p, entropy, varentropy and rank of every response token of `data` under `model`, into the directory `out`.

    data: a file, directory, hub id or embedded task, or fields of the source 'dataset' such as {"data": ..., "columns":
    ...}; model: "tiny", a directory, a hub id or a run, or fields of a recipe's `model`; settings: see `ScoreSettings`.
    Where `out` holds a part of the same scoring, it goes on. Raises DataError for bad rows that are not to be skipped,
    RunError where `out` holds something else.
    """
    chosen: ScoreSettings = (
        data
        if isinstance(data, ScoreSettings)
        else build(ScoreSettings, {"data": data, "model": model, **settings}, "score")
    )
    work = _Work(chosen, Path(out), Path(base_dir), engine or Engine(), meter or Meter())
    work.run()
    return Scores(out)


class _Work:
    def __init__(self, settings: ScoreSettings, out: Path, base_dir: Path, engine: Engine, meter: Meter):
        # From a run its last checkpoint, so that what was scored stays known when the run goes on.
        self.settings = settings.model_copy(update={"model": opened_model(settings.model)})
        self.out, self.base_dir, self.engine, self.meter = out, base_dir, engine, meter
        self.parts = out / "parts"

    def run(self) -> None:
        from statewise.onpolicy.pages import write_score_page
        from statewise.onpolicy.summary import summarise_scores

        self._open()
        with RunDir(self.out).lock():
            if not (self.out / "scores.parquet").is_file():
                self._score()
                self._join()
            found = Scores.__new__(Scores)  # its summary is still to be made
            found.path = self.out
            if not (self.out / "summary.json").is_file():
                summary = summarise_scores(found)
                write_score_page(found, summary)
                atomic_write(self.out / "summary.json", to_json(summary, indent=2) + "\n")
            shutil.rmtree(self.parts, ignore_errors=True)
            for left_by_a_kill in self.out.glob(".*.tmp"):
                left_by_a_kill.unlink()

    def _open(self) -> None:
        """Make the directory, or see that it holds the same scoring."""
        facts: dict[str, Any] = {
            "schema": SCHEMA,
            "settings": self.settings.model_dump(mode="json"),
            "data_files": fingerprint.of_data(self.settings.data, self.base_dir),
            "model_files": fingerprint.of_model(self.settings.model),
        }
        file = self.out / "manifest.json"
        if file.is_file():
            before = {name: value for name, value in _read(file).items() if name in facts}
            others = fingerprint.differences(before, json.loads(to_json(facts)))
            if others and not self._is_stillborn():
                raise RunError(
                    f"{self.out}: holds another scoring; it differs in {'; '.join(others[:5])}. Choose another --out, or "
                    "remove the directory."
                )
            if not others:
                return
            shutil.rmtree(self.parts, ignore_errors=True)
        elif self.out.is_dir() and not is_unused(self.out):
            raise RunError(f"{self.out}: is not empty and holds no scoring; choose another --out.")
        try:
            self.parts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"{self.out}: can't be made a directory of scores: {error.strerror}. Choose another --out."
            ) from None
        atomic_write(file, to_json({**facts, "base_dir": str(self.base_dir.resolve())}, indent=2) + "\n")

    def _is_stillborn(self) -> bool:
        """Whether nothing was scored here yet, so that a mended command may take its place."""
        done = (self.out / "scores.parquet").exists() or any(self.parts.glob("*.parquet"))
        return not done and not RunDir(self.out).is_locked()

    def _part(self, number: int) -> Path:
        return self.parts / f"{number:08d}.parquet"

    def _score(self) -> None:
        self.parts.mkdir(exist_ok=True)
        self.meter.start(*self._totals())
        for number, chunk in scored(self.settings, self.engine, self._missing(), self.meter.tokens):
            atomic_write(self._part(number), chunk.to_parquet())
            self.meter.rows(int(chunk.facts["rows"]))
        self.meter.stop()

    def _missing(self) -> Iterator[tuple[int, Numbered]]:
        for number, rows in enumerate(read_chunks(self.settings, self.base_dir)):
            if not self._part(number).is_file():
                yield number, rows
            else:
                _, facts = records.told_of(self._part(number))
                self.meter.known(len(rows), int(facts["tokens"]))

    def _totals(self) -> tuple[int, int | None]:
        """Rows of the data, and tokens where all were encoded; looked at once.

        Where bad rows are errors, all rows are encoded before anything is scored, so that none is met after hours.
        """
        file = self.parts / "totals.json"
        if not file.is_file():
            atomic_write(file, to_json(self._looked_through()))
        totals = _read(file)
        return totals["rows"], totals["tokens"]

    def _looked_through(self) -> dict[str, int | None]:
        source, rows, tokens = self.settings.data, 0, 0
        strict = "error" in (source.on_bad_row, source.too_long)
        encoder = open_encoder(self.settings)
        self.meter.say(f"looking through {source.data}")
        for index, placed in enumerate(source.stream(self.base_dir)):
            rows += 1
            if index == 0 and (doubt := encoder.doubt(placed)):
                self.meter.say(f"warning: {doubt}")
            if strict:
                made = encoder.try_encode(index, placed)
                tokens += 0 if isinstance(made, records.Bad) else len(made[1])
        return {"rows": rows, "tokens": tokens if strict else None}

    def _join(self) -> None:
        """scores.parquet is written last: where it is, all is."""
        parts = sorted(self.parts.glob("*.parquet"))
        told = [records.told_of(part) for part in parts]
        totals = {
            name: sum(facts[name] for _, facts in told) for name in ("rows", "tokens", "scored_tokens", "seconds")
        }
        if not totals["scored_tokens"]:
            raise DataError(f"{self.settings.data.data}: no row can be scored (first: {_first_bad(told)}).")
        rate = totals["tokens"] / totals["seconds"]
        facts: dict[str, Any] = {**totals, "tokens_per_second_and_process": rate, "processes": self.engine.processes}
        facts |= {"versions": environment.versions(), "hardware": environment.hardware()}
        atomic_write(self.out / "run.json", to_json(facts, indent=2) + "\n")
        bad = [to_json(vars(b)) for left_out, _ in told for b in left_out]
        if bad:
            atomic_write(self.out / "bad_rows.jsonl", "\n".join(bad) + "\n")
        records.join(parts, self.out / "scores.parquet")


def _first_bad(told: list[tuple[list[records.Bad], dict[str, float]]]) -> str:
    return next((f"{b.place}: {b.message}" for bad, _ in told for b in bad), "there is no row")


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{file}: can't be read: {error}") from None
    if not isinstance(content, dict):
        raise RunError(f"{file}: received {type(content).__name__}, expected a JSON object.")
    return content
