"""`statewise filter`: a part of scored data, with a record of the choice."""

from __future__ import annotations

from pathlib import Path

import typer

from statewise.cli.output import print_json, print_table

BY = "mean_phi, z, min_phi, perplexity or num_tokens: by what quantiles, budgets and order go."


def command(
    scores: Path = typer.Argument(help="A directory that `statewise score` wrote."),
    out: Path = typer.Option(..., help="A .jsonl or .parquet file that is not there yet."),
    min_mean_phi: float = typer.Option(None, help="Nats a token, such as -0.1."),
    max_mean_phi: float = typer.Option(None, help="Nats a token."),
    min_z: float = typer.Option(None, help="Of z = sum phi / sqrt(sum varentropy)."),
    max_z: float = typer.Option(None, help="Of z."),
    max_share_below: float = typer.Option(None, help="Share of a sample's tokens with phi under --below."),
    below: float = typer.Option(-5.0, help="What counts as a very negative phi, in nats."),
    quantiles: tuple[float, float] = typer.Option(
        None, help="The part between two quantiles, such as 0.1 1 (0: lowest)."
    ),
    max_rows: int = typer.Option(None, min=1, help="At most so many rows, the most on-policy first."),
    max_tokens: int = typer.Option(None, min=1, help="At most so many response tokens, the most on-policy first."),
    by: str = typer.Option("mean_phi", help=BY),
    sort: str = typer.Option("input", help="input, easy_first (most on-policy first) or hard_first."),
    as_json: bool = typer.Option(False, "--json", help="Print the record as JSON."),
) -> None:
    """Keep the rows of scored data that are on-policy enough, or order them by it.

    The rows are written as they were; OUT.choice.json says what was chosen and what that did.
    """
    from statewise.onpolicy.filtering import filter_data

    given = {
        "min_mean_phi": min_mean_phi,
        "max_mean_phi": max_mean_phi,
        "min_z": min_z,
        "max_z": max_z,
        "max_share_below": max_share_below,
        "below": below,
        "quantiles": quantiles or None,
        "max_rows": max_rows,
        "max_tokens": max_tokens,
        "by": by,
        "sort": sort,
    }
    record = filter_data(scores, out, **given)
    if as_json:
        return print_json(record)
    before, after = record["before"], record["after"]
    print_table(["", "before", "after"], [[name, before[name], after[name]] for name in before])
    for name, count in record["left_out"].items():
        print(f"left out by {name}: {count}")
    print(f"\n{out}")
