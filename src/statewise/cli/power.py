"""`statewise power`: how many items a comparison needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from statewise.cli.output import print_json, print_table, say
from statewise.errors import RecipeError

SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)  # discordance, where it is not known


def command(
    delta: float = typer.Option(..., help="The difference to see, in the score's unit: 0.03 is three points."),
    discordant: float = typer.Option(None, help="Share of items whose score changes; default: a table of shares."),
    alpha: float = typer.Option(0.05, help="Level of the two-sided test."),
    power: float = typer.Option(0.8, help="Chance to see the difference."),
    run_a: Path = typer.Option(
        None, help="A run or a directory of `eval --out`: discordance is measured with --run-b."
    ),
    run_b: Path = typer.Option(None, help="The other; default: step 0 of --run-a."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Items that a paired comparison needs to see a difference.

    For scores of 0 and 1 the exact McNemar test, for graded scores the paired t-test; with runs, also the smallest
    difference that their own number of items shows.
    """
    if run_b is not None and run_a is None:
        raise RecipeError(
            "--run-b: received without --run-a; name both, or --run-a alone to compare it with its step 0."
        )
    try:
        if run_a is not None:
            found = _measured(run_a, run_b, delta, alpha, power)
        else:
            shares = [discordant] if discordant is not None else [s for s in SHARES if s >= abs(delta)] or [abs(delta)]
            found = [_assumed(delta, share, alpha, power) for share in shares]
    except ValueError as error:
        raise RecipeError(f"power: {error}.") from None
    if as_json:
        return print_json({"delta": delta, "alpha": alpha, "power": power, "comparisons": found})
    if run_a is None and discordant is None:
        say("the share of items whose score changes is not known; measure it with --run-a, or give --discordant")
    columns = list(dict.fromkeys(key for row in found for key in row))
    print(_meaning(columns, delta, alpha, power) + "\n")
    print_table([c.replace("_", " ") for c in columns], [[row.get(c) for c in columns] for row in found])


def _meaning(columns: list[str], delta: float, alpha: float, power: float) -> str:
    """What the numbers of the table say, in a sentence."""
    told = {
        "discordant": "discordant: share of items whose score changes",
        "spread": "spread: standard deviation of the differences",
        "n": "n: items that were compared",
        "smallest_seen": "smallest seen: the least difference that n items show",
    }
    need = f"items: how many a paired comparison needs to see a difference of {delta:g} with {power:.0%} power at level {alpha:g}"
    return "; ".join([need, *(words for name, words in told.items() if name in columns)]) + "."


def _assumed(delta: float, share: float, alpha: float, power: float) -> dict[str, Any]:
    from statewise.stats import mcnemar_items

    return {"discordant": share, "items": mcnemar_items(delta, share, alpha, power)}


def _measured(a: Path, b: Path | None, delta: float, alpha: float, power: float) -> list[dict[str, Any]]:
    from statewise.evals.from_runs import last_results, read_base

    after = last_results(a)
    before = read_base(a) if b is None else last_results(b)
    shared = [task for task in after if task in before]
    if not shared:
        raise RecipeError(f"{a} and {b or a}: have no task in common; evaluate both on the same tasks.")
    return [{"task": task, **_needs(task, before[task], after[task], delta, alpha, power)} for task in shared]


def _needs(task: str, before: Any, after: Any, delta: float, alpha: float, power: float) -> dict[str, Any]:
    import numpy as np

    from statewise.evals.ledger import matrices
    from statewise.stats import mcnemar_delta, mcnemar_items, t_items

    x, y, _ = matrices(task, [(before, after)])
    gaps = (y - x)[0]
    if np.isin([x, y], (0, 1)).all():
        share = max(float((gaps != 0).mean()), abs(delta))
        shown = mcnemar_delta(gaps.size, share, alpha, power)
        items = mcnemar_items(delta, share, alpha, power)
        return {"n": gaps.size, "discordant": share, "items": items, "smallest_seen": shown}
    spread = float(gaps.std(ddof=1)) if gaps.size > 1 else float("nan")
    return {"n": gaps.size, "spread": spread, "items": t_items(delta, spread, alpha, power)}
