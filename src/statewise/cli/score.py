"""`statewise score`: how on-policy a data set is for a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from statewise.cli.output import print_json, print_table, say
from statewise.errors import RecipeError

DATA = (
    "A .jsonl, .json, .parquet or .csv file, a directory of them, a hub id, or an embedded task such as tiny:math; then "
    "settings of the source 'dataset', such as columns.prompt=question chat=true on_bad_row=skip."
)
MODEL = "tiny, a directory, a hub id, or a run directory (its last checkpoint)."
OUT = "default: a name under scores/ that data, model and settings make."
BATCH_TOKENS = typer.Option(None, min=1, help="Padded tokens a forward pass; default: 1024 on a CPU, else 8192.")


def command(
    words: list[str] = typer.Argument(..., metavar="DATA [KEY=VALUE]...", help=DATA),
    model: str = typer.Option(..., help=MODEL),
    out: Path = typer.Option(None, help="Directory for the scores, gone on with where it holds a part; " + OUT),
    limit: int = typer.Option(None, min=1, help="The first so many rows only; the same as limit=N."),
    temperature: float = typer.Option(1.0, help="Logits are divided by it before all statistics."),
    dtype: str = typer.Option("auto", help="Of the model: auto, float32, bfloat16, float16. Statistics are float32."),
    batch_tokens: int = BATCH_TOKENS,
    processes: int = typer.Option(1, min=1, help="Processes that score; the results are the same bytes."),
    on: str = typer.Option("local", help="local, or ray: the processes are Ray workers."),
    threads: int = typer.Option(None, min=1, help="Threads of each process; default: the cores shared out."),
    device: str = typer.Option(None, help="cpu, cuda, cuda:1 ...; default: a GPU each where there are some."),
    quiet: bool = typer.Option(False, "--quiet", help="Show no progress."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
) -> None:
    """Score every response token of a data set: phi = log p + H, and what it adds up to.

    Writes scores.parquet, summary.json and report.html. Killed, the same command goes on where it was.
    """
    data, fields = data_and_settings(words)
    if limit is not None:
        fields["limit"] = limit
    out = out or default_out("scores", data, {"model": model, "temperature": temperature, "dtype": dtype, **fields})
    if not quiet:
        say(f"scoring {data} under {model}")
    from statewise.onpolicy.scoring import score

    scores = score(
        {"data": data, **fields},
        {"path": model, "dtype": dtype},
        out=out,
        engine=engine_of(processes, on, threads, device),
        meter=meter_of("scored", quiet),
        temperature=temperature,
        batch_tokens=batch_tokens,
    )
    if as_json:
        return print_json(scores.summary)
    print_summary(scores.summary)
    print(f"\n{out}/report.html")


def data_and_settings(
    words: Sequence[str], kind: str = "dataset", hidden: Sequence[str] = ("data", "shuffle")
) -> tuple[str, dict[str, Any]]:
    """What to read, and the fields of the source of this kind that are set; not those that are hidden. Raises RecipeError."""
    from statewise.component import kinds
    from statewise.overrides import apply_overrides

    paths = [w for w in words if "=" not in w or Path(w).exists()]
    wrong = next((p for p in paths if p.startswith("--")), None)
    if wrong is not None:
        raise RecipeError(f"unknown option '{wrong}'; see --help.")
    if len(paths) != 1:
        raise RecipeError(f"received the data {paths}, expected one; a setting is KEY=VALUE.")
    known = [name for name in kinds("source")[kind].model_fields if name not in hidden]
    return paths[0], apply_overrides({}, [w for w in words if w not in paths], known)


def default_out(folder: str, data: str, settings: dict[str, Any]) -> Path:
    """`scores/train-tiny-3f2a91`: the same for the same command, so that it goes on where it was."""
    from hashlib import blake2b

    from statewise.files import to_json

    digest = blake2b(to_json({"data": data, **settings}).encode(), digest_size=4).hexdigest()
    names = [Path(name.replace(":", "_")).stem for name in (data, str(settings["model"])) if name]
    return Path(folder) / "-".join([*names, digest])


def engine_of(processes: int, on: str, threads: int | None, device: str | None) -> Any:
    from statewise.component import build
    from statewise.onpolicy.settings import Engine

    return build(Engine, {"processes": processes, "on": on, "threads": threads, "device": device}, "engine")


def meter_of(label: str, quiet: bool) -> Any:
    from statewise.onpolicy.meter import Meter, Shown
    from statewise.training.progress import hide_library_noise

    hide_library_noise()
    return Meter() if quiet else Shown(label)


def print_summary(summary: dict[str, Any]) -> None:
    """The verdict, and the numbers that it rests on."""
    from statewise.onpolicy.summary import NUMBERS

    print(summary["verdict"] + "\n")
    labels = {"samples": "samples", "tokens": "response tokens", **NUMBERS}
    print_table(["", "value"], [[label, summary[name]] for name, label in labels.items()])
    for reason, kind in summary["bad_rows"].items():
        print(f"left out: {kind['rows']} rows: {reason} (first: {', '.join(kind['first'])})")
