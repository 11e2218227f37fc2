"""A data set realigned: each answer replaced by one in the model's own words, part by part, so that a killed run goes on.

realign.json    the settings, and what data and model are told by
parts/          a Parquet file for each `part_rows` rows, all outcomes with ids, phi and lambda
data.jsonl      the kept rows, for `statewise train` and TRL        written once all parts are there,
tokens.parquet  all parts in one                                    by whichever shard is the last
summary.json    yields, and phi before and after
report.html     the same with figures, and texts side by side
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from statewise.component import parse
from statewise.errors import RunError
from statewise.files import atomic_write, is_unused, to_json
from statewise.onpolicy import fingerprint
from statewise.onpolicy.meter import Meter
from statewise.onpolicy.realign_page import write_report
from statewise.onpolicy.realign_part import PartMaker
from statewise.onpolicy.realign_summary import Summary
from statewise.onpolicy.realigned import join_parts, read_part, write_lines, write_part
from statewise.settings import ModelSettings, Settings
from statewise.sources.hinted import HintedSource
from statewise.sources.plain import untemplated

SCHEMA = 1


class RealignSettings(Settings):
    """source: the data and how they are realigned; model: whose words; part_rows: rows that are decoded and stored together,
    whoever does it, so that bytes don't depend on the number of shards."""

    source: HintedSource
    model: ModelSettings = ModelSettings()
    seed: int = 0
    part_rows: int = Field(64, ge=1)

    @field_validator("source", mode="before")
    @classmethod
    def _source(cls, value: Any) -> Any:
        return parse("source", {"kind": "hinted", **value} if isinstance(value, dict) else value, "realign")

    def facts(self, base_dir: Path) -> dict[str, Any]:
        """What decides the result."""
        return {
            "schema": SCHEMA,
            "source": self.source.model_dump(mode="json"),
            "model": self.model.model_dump(mode="json"),
            "seed": self.seed,
            "part_rows": self.part_rows,
            "data_files": fingerprint.of_data(self.source, base_dir),
            "model_files": fingerprint.of_model(self.model),
        }


@dataclass(frozen=True)
class Realignment:
    """A directory that a data set is realigned into. shard (i, n): only the parts i, i + n, ..., counted from 1."""

    settings: RealignSettings
    out: Path
    shard: tuple[int, int] = (1, 1)
    base_dir: Path = Path(".")
    meter: Any = field(default_factory=Meter)

    def run(self) -> dict[str, Any] | None:
        """Do what is missing of the shard; the summary where all parts are there afterwards, else None.

        Raises RunError for a directory that holds something else, DataError and RecipeError for bad rows and settings.
        """
        self._claim()
        source, world = self.settings.source, self.maker.world
        prompts = source.prompts(world)
        source.before_training(source, world)
        if doubt := untemplated(source, world):
            self.meter.say(f"warning: {doubt}")
        parts = self._parts(len(prompts))
        own = parts[self.shard[0] - 1 :: self.shard[1]]
        self.meter.start(sum(len(rows) for _, rows in own))
        for path, rows in own:
            if path.is_file():
                self.meter.known(len(rows), 0)
                continue
            made = self.maker.make([prompts[i] for i in rows], rows)
            write_part(path, made)
            self.meter.tokens(sum(len(row.text_ids) for row in made))
            self.meter.rows(len(rows))
        self.meter.stop()
        return self._join([path for path, _ in parts]) if all(path.is_file() for path, _ in parts) else None

    def _claim(self) -> None:
        """The directory is new, or ours from the same settings."""
        file, facts = self.out / "realign.json", self.settings.facts(self.base_dir)
        if file.is_file():
            changed = fingerprint.differences(json.loads(file.read_text(encoding="utf-8")), json.loads(to_json(facts)))
            if changed:
                raise RunError(
                    f"{self.out}: holds a realignment of other settings: {'; '.join(changed)}. Choose another --out."
                )
        elif not is_unused(self.out):
            raise RunError(f"{self.out}: exists and is no realignment; choose another --out.")
        (self.out / "parts").mkdir(parents=True, exist_ok=True)
        atomic_write(file, to_json(facts, indent=2) + "\n")

    def _parts(self, count: int) -> list[tuple[Path, range]]:
        size = self.settings.part_rows
        starts = range(0, count, size)
        return [(self.out / "parts" / f"{n:05d}.parquet", range(s, min(s + size, count))) for n, s in enumerate(starts)]

    @cached_property
    def maker(self) -> PartMaker:
        settings = self.settings
        return PartMaker(settings.source, settings.model, settings.seed, self.base_dir, self._note)

    def _note(self, stage: str, done: int, count: int) -> None:
        self.meter.label = f"realign [{stage} {done}/{count}]"
        self.meter.show()

    def _join(self, parts: Sequence[Path]) -> dict[str, Any]:
        """The results of all parts, the same bytes whoever joins them."""
        tokenizer = self.maker.policy.tokenizer
        summary = Summary()
        rows = (row.to_row(tokenizer) for part in parts for row in map(summary.see, read_part(part)) if row.is_kept)
        write_lines(self.out / "data.jsonl", rows)
        join_parts(self.out / "tokens.parquet", parts)
        source = self.settings.source
        hint, _, delimiter = source.shown(self.maker.world)
        facts = {"data": source.data, "model": self.settings.model.path, "hint": hint, "delimiter": delimiter}
        told = facts | summary.to_plain()
        atomic_write(self.out / "summary.json", to_json(told, indent=2) + "\n")
        write_report(self.out / "report.html", told, summary, tokenizer)
        return told
