"""`statewise realign`: the answers of a data set in a model's own words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from statewise.cli.output import print_json, say
from statewise.errors import Interrupted, RecipeError
from statewise.estimates import number

NONE_KEPT = (
    "nothing was kept; report.html shows the texts. What may help: another --hint (echo for a base model),\n"
    "--delimiter none where answers end in no marker, a larger --max-tokens, or a model that follows instructions."
)
HIDDEN = ("data", "shuffle", "writer")  # of the source, and not to be set as KEY=VALUE


def command(
    words: list[str] = typer.Argument(
        ...,
        metavar="DATA [KEY=VALUE]...",
        help="A file, directory, hub id or tiny:NAME; settings of the source 'hinted'.",
    ),
    model: str = typer.Option(..., help="A run, a model directory, a hub id or tiny."),
    out: Path = typer.Option(..., help="Directory for data.jsonl, tokens.parquet, summary.json, report.html."),
    verifier: str = typer.Option("answer", help="What accepts an answer; settings as verifier.KEY=VALUE."),
    hint: str = typer.Option("auto", help="instruct, analysis, thinking, base, echo, or a TOML file."),
    delimiter: str = typer.Option("auto", help="Text behind which the plain stream writes alone, or none."),
    beta: float = typer.Option(3.0, help="Weight of the plain stream is clip(beta H / ln V, 0, 1)."),
    max_tokens: int = typer.Option(1024, min=1, help="New tokens of an answer at most."),
    limit: int = typer.Option(None, min=1, help="The first so many rows."),
    seed: int = typer.Option(0, help="Of every random stream."),
    dtype: str = typer.Option("auto", help="auto (the checkpoint's own), float32, bfloat16, float16."),
    part_rows: int = typer.Option(
        64, min=1, help="Rows decoded and stored together; a killed run loses at most these."
    ),
    shard: str = typer.Option(
        "1/1", metavar="I/N", help="Do every N-th part, from the I-th; the last shard joins them."
    ),
    quiet: bool = typer.Option(False, "--quiet", help="Show no progress."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
) -> None:
    """Replace each answer by one that the model writes itself: its own where that is right, else by Hinted Decoding.

    What the verifier rejects is left out. The same command goes on after a kill. DATA is never written to.
    """
    from statewise.cli.score import data_and_settings, meter_of

    data, fields = data_and_settings(words, "hinted", HIDDEN)
    if isinstance(fields.get("verifier"), dict):
        fields["verifier"] = {"kind": verifier, **fields["verifier"]}
    plain = {"data": data, "verifier": verifier, "hint": hint, "delimiter": delimiter, "beta": beta}
    plain |= {"max_tokens": max_tokens, "limit": limit} | fields
    from statewise.onpolicy.realign import Realignment, RealignSettings

    made = RealignSettings(source=plain, model=_model(model, dtype), seed=seed, part_rows=part_rows)
    part = _shard(shard)
    if not quiet:
        say(f"realigning {data} with {model} -> {out}" + (f" (shard {shard})" if part[1] > 1 else ""))
    try:
        told = Realignment(made, out, part, meter=meter_of("realign", quiet)).run()
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; the same command goes on from {out}") from None
    if as_json:
        return print_json(told if told is not None else {"joined": False, "shard": shard})
    print("\n".join(_lines(told, out, shard)))


def _model(path: str, dtype: str) -> Any:
    from statewise.component import build
    from statewise.settings import ModelSettings

    return build(ModelSettings, {"path": path, "dtype": dtype}, "model")


def _shard(text: str) -> tuple[int, int]:
    """`2/4` as (2, 4)."""
    index, sign, count = text.partition("/")
    if not sign or not index.isdigit() or not count.isdigit() or not 1 <= int(index) <= int(count):
        raise RecipeError(f"--shard {text}: expected I/N with I from 1 to N, such as 1/4.")
    return int(index), int(count)


def _lines(told: dict[str, Any] | None, out: Path, shard: str) -> list[str]:
    if told is None:
        return [f"shard {shard} is done; {out} is joined when the other shards are"]
    yields = ", ".join(f"{kind} {count}" for kind, count in told["yields"].items() if count)
    lines = [f"{told['kept']} of {told['rows']} rows kept ({yields})"]
    phi = {name: told["phi"][name]["mean"] for name in ("original", "kept") if told["phi"][name]}
    if not told["kept"]:
        lines.append(NONE_KEPT)
    if len(phi) == 2:
        lines.append(
            f"mean phi: {number(phi['original'], '.3f')} before, {number(phi['kept'], '.3f')} after (nats a token)"
        )
    return [*lines, f"{out}/data.jsonl, tokens.parquet, summary.json, report.html"]
