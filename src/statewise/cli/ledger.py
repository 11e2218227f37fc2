"""`statewise ledger`: what runs gained and forgot, and gates for CI."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from statewise.cli.output import print_json, print_table, say
from statewise.errors import CheckFailed, RecipeError, RunError
from statewise.estimates import few_seeds, interval, number

if TYPE_CHECKING:
    from statewise.evals.ledger import Change, Estimate, Ledger

BOUNDS = ("point", "surely", "possibly")
PURPOSES = ("target", "retention", "probe")


def command(
    runs: list[Path] = typer.Argument(
        help="Run directories, those that differ in their seed alone taken together; or directories of `eval --out`."
    ),
    base: Path = typer.Option(None, help="A run (its step 0) or a directory of `eval --out`, as the base of all."),
    step: int = typer.Option(None, min=1, help="Of the evaluation after training; default: the last."),
    target: list[str] = typer.Option([], help="A task that was trained for; default: tasks with generated answers."),
    retention: list[str] = typer.Option([], help="A task that should be kept; default: tasks by likelihood."),
    apart: bool = typer.Option(False, "--apart", help="A ledger for every run, seeds too."),
    gate: list[str] = typer.Option([], help="NAME=LIMIT, such as max_drop=0.02; exit 1 where it is broken."),
    gate_bound: str = typer.Option("point", help="Held against the limit: point, surely or possibly (interval ends)."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Gains and forgetting of runs against their base, a task, with paired intervals.

    Gates: max_drop (any retention task), max_mean_drop, min_retention, min_gain (any target task), max_probe_rise (nats).
    """
    from statewise.evals.from_runs import repeated_seeds, same_but_seed
    from statewise.evals.gates import parse_gate, violations

    if gate_bound not in BOUNDS:
        raise RecipeError(f"--gate-bound: received '{gate_bound}', expected one of {', '.join(BOUNDS)}.")
    gates = [parse_gate(text) for text in gate]
    purposes = {**dict.fromkeys(target, "target"), **dict.fromkeys(retention, "retention")}
    groups = [[run] for run in runs] if apart else same_but_seed(runs)
    ledgers, groups = _readable(groups, bool(gates), base=base, step=step, purposes=purposes)
    _check_names(purposes, ledgers)
    for group in groups:
        for seed in repeated_seeds(group):
            say(
                f"warning: {_name(group)}: seed {seed} is there more than once; intervals are too narrow (see --apart)."
            )
    broken = [line for ledger in ledgers for line in violations(ledger, gates, gate_bound)]  # type: ignore[arg-type]
    if as_json:
        print_json({"ledgers": [ledger.to_plain() for ledger in ledgers], "violations": broken})
    else:
        _print(ledgers)
    if broken:
        raise CheckFailed("a gate is broken\n" + "\n".join(f"  {line}" for line in broken))
    if gates:
        say(f"all gates hold: {', '.join(gate)}")


def _readable(groups: list[list[Path]], strict: bool, **settings: Any) -> tuple[list[Ledger], list[list[Path]]]:
    """The ledgers of what was evaluated twice, and their groups. Others are named and left out; a gate must not miss them."""
    from statewise.evals.from_runs import arm_ledger

    ledgers, kept = [], []
    for group in groups:
        try:
            ledgers.append(arm_ledger(_name(group), group, **settings))
            kept.append(group)
        except RunError as error:
            if strict or len(groups) == 1:
                raise
            say(f"left out: {error}")
    if not ledgers:
        raise RunError("ledger: none of the runs was evaluated before and after training.")
    return ledgers, kept


def _name(group: list[Path]) -> str:
    more = f" and {len(group) - 1} more seed{'s' * (len(group) > 2)}" if len(group) > 1 else ""
    return f"{group[0]}{more}"


def _check_names(purposes: dict[str, str], ledgers: list[Ledger]) -> None:
    known = {change.task for ledger in ledgers for change in ledger.changes}
    for name in purposes:
        if name not in known:
            raise RecipeError(f"task '{name}': was not evaluated; there are: {', '.join(sorted(known))}.")


def _print(ledgers: list[Ledger]) -> None:
    for ledger in ledgers:
        print(f"{ledger.name}")
        changes = sorted(ledger.changes, key=lambda c: PURPOSES.index(c.purpose))
        columns = ["task", "purpose", "n", "base", "post", "F [95 %]", "post / base", "up/down", "p", "p Holm", ""]
        print_table(columns, [_row(change) for change in changes])
        if ledger.of("retention"):
            print(
                f"mean forgetting {_told(ledger.forgetting, '+.4f')}, mean retention {_told(ledger.retention, '.4f')}"
            )
        print("\n".join([ledger.method, *filter(None, [few_seeds({ledger.name: ledger.seeds})]), ""]))


def _row(c: Change) -> list[Any]:
    return [
        c.task,
        c.purpose,
        c.n if c.seeds == 1 else f"{c.n} x {c.seeds}",
        number(c.base, ".4f"),
        number(c.post, ".4f"),
        _told(c.forgetting, "+.4f"),
        "-" if math.isnan(c.retention.value) else _told(c.retention, ".3f"),
        f"{c.gained}/{c.lost}",
        _p(c.p_value),
        _p(c.p_holm),
        c.verdict,
    ]


def _p(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.3f}" if value >= 0.001 else f"{value:.0e}"


def _told(e: Estimate, form: str) -> str:
    return interval(e.value, e.low, e.high, form, "undefined")
