"""`statewise sample`: what a recipe's source samples, as a data set."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import typer

from statewise.cli.output import print_json, say
from statewise.errors import DataError, RecipeError

OPTIONS = ("--out", "--count", "--json", "--quiet", "--help")
REPORT_SECONDS = 5.0


def command(
    words: list[str] = typer.Argument(..., metavar="RECIPE [KEY=VALUE]...", help="A file or a shipped recipe."),
    out: Path = typer.Option(..., help="A .jsonl file that is not there yet."),
    count: int = typer.Option(
        None, min=1, help="The most rows written: completions, drawn in whole groups of a prompt; default: a pass."
    ),
    quiet: bool = typer.Option(False, "--quiet", help="Show no progress."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Write what the source of a recipe gives (sources that sample: rejection, policy, teacher ...) as a data set.

    A row is a completion, with the reward of the recipe's verifier. Nothing is trained.
    model.path=RUN takes the last checkpoint of a run. The file can be read by the source `dataset`.
    """
    from statewise.cli.words import split_words
    from statewise.recipe import Recipe

    name, overrides = split_words(words, OPTIONS)
    if name is None:
        raise RecipeError("sample: no recipe is named; give a file or a name of `statewise recipe list`.")
    recipe = Recipe.load(name, overrides)
    if out.exists():
        raise RecipeError(f"--out {out}: exists; choose another file.")

    last, drawn, tally, seen = time.monotonic() - REPORT_SECONDS, 0, _Tally(), list[dict[str, float]]()

    def report(done: int, wanted: int, measures: dict[str, float]) -> None:
        nonlocal last, drawn
        drawn = done
        seen.append(measures)
        if not quiet and (done >= wanted or time.monotonic() - last >= REPORT_SECONDS):
            last = time.monotonic()
            shown = [f"drawn={done}/{wanted}", f"rows={tally.rows}"]
            say(" ".join([*shown, *(f"{k}={v:.4g}" for k, v in measures.items())]))

    from statewise.training.alarms import why_nothing
    from statewise.training.progress import hide_library_noise
    from statewise.training.sampling import sampled_rows

    hide_library_noise()
    _write(out, map(tally.see, sampled_rows(recipe, count, report, say)))
    if not tally.rows:
        raise DataError(f"sample: no row, so no file: of {drawn} completions none was kept: {why_nothing(seen)}")
    if as_json:
        return print_json({"file": str(out), "drawn": drawn, **tally.to_plain()})
    print(f"{tally.rows} rows in {out}: {tally.words(drawn)}")


@dataclass
class _Tally:
    """What is written: rows, of how many prompts, how many of them without a text, and their rewards."""

    rows: int = 0
    empty: int = 0
    prompts: set[str] = field(default_factory=set)
    rewards: list[float] = field(default_factory=list)

    def see(self, row: dict[str, Any]) -> dict[str, Any]:
        completion = row["completion"]
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        self.rows += 1
        self.empty += not text.strip()
        self.prompts.add(row["id"].rsplit("-", 2)[0])
        if row["reward"] is not None:
            self.rewards.append(row["reward"])
        return row

    @property
    def reward(self) -> float | None:
        return fmean(self.rewards) if self.rewards else None

    def to_plain(self) -> dict[str, Any]:
        return {"rows": self.rows, "prompts": len(self.prompts), "empty": self.empty, "reward": self.reward}

    def words(self, drawn: int) -> str:
        reward = "no rewards" if self.reward is None else f"mean reward {self.reward:.4g}"
        plural = "" if len(self.prompts) == 1 else "s"
        return (
            f"{len(self.prompts)} prompt{plural}, {drawn} completions drawn, {self.empty} of the rows empty, {reward}"
        )


def _write(out: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Row by row, under the name with `.partial` behind until all are there; what was sampled stays there on a failure.

    No file where there is no row.
    """
    from statewise.files import naming, to_json

    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    with naming(partial), partial.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(to_json(row) + "\n")
            file.flush()
    if partial.stat().st_size:
        partial.replace(out)
    else:
        partial.unlink()
