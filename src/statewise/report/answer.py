"""The answer in sentences, with intervals, and what was not significant said plainly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from statewise.estimates import few_seeds, interval, number
from statewise.report.scores import BASE, Scores

Row = dict[str, Any]
MANY = 4  # names in a list before it is cut
FEW = 2  # arms that are told with their intervals; those of more are in the table


def sentences(table: Scores) -> list[str]:
    """What the scores say: the largest gain, who kept most, the comparison with the chosen arm, what stayed open."""
    gains, kept = table.of(BASE, "target"), table.of(BASE, "retention")
    if not gains and not kept:
        return ["No run has been evaluated before and after training, so there is nothing to compare yet."]
    arms = {row["arm"]: row for row in table.arms}
    found = [_largest(gains, arms)] if gains else []
    found += _retention(kept, arms)
    found += _versus(table)
    few = few_seeds({row["arm"]: row["seeds"] for row in [*gains, *kept]})
    return [*found, *_open(table), *([few] if few else [])]


def estimate(value: Row, form: str = ".3f") -> str:
    """`+0.210 [+0.170, +0.250]`; without brackets where there is no interval."""
    return interval(value["value"], value["low"], value["high"], form, "undefined")


def _largest(gains: Sequence[Row], arms: dict[str, Row]) -> str:
    best = max(gains, key=lambda row: row["difference"]["value"])
    target = best["task"]
    size = f"{best['n']} examples" + (f", {best['seeds']} seeds" if best["seeds"] > 1 else "")
    before, after = (number(best[side], ".3f") for side in ("before", "after"))
    change = f"{before} to {after}, {estimate(best['difference'], '+.3f')} (95 %, paired; {size})"
    ratio = arms[best["arm"]].get("retention")
    keeps = (
        f" It kept {estimate(ratio)} of the retention tasks' scores."
        if ratio and ratio["value"] == ratio["value"]
        else ""
    )
    if best["verdict"] == "better":
        most = "gained most on" if len(gains) > 1 else "gained on"
        return f"{best['arm']} {most} {target}: {change}.{keeps}"
    if len(gains) == 1:
        return f"{best['arm']}: the change on {target} is {best['verdict']}: {change}.{keeps}"
    return f"No arm gained significantly on {target}; the best is {best['arm']}: {change}.{_alone(best)}{keeps}"


def _alone(row: Row) -> str:
    """Why an interval that excludes 0 is not significant: it is of this comparison alone."""
    low, high, p = row["difference"]["low"], row["difference"]["high"], row["p_holm"]
    if p is None or not low * high > 0:
        return ""
    return f" The interval, of this comparison alone, excludes 0; adjusted for all comparisons p = {p:.2g}."


def _retention(kept: Sequence[Row], arms: dict[str, Row]) -> list[str]:
    """Who forgot: the significant losses, largest first."""
    if not kept:
        return []
    worse = sorted((row for row in kept if row["verdict"] == "worse"), key=lambda row: row["difference"]["value"])
    if not worse:
        return ["No significant forgetting was seen on any retention task."]
    by_arm: dict[str, list[Row]] = {}
    for row in worse:
        by_arm.setdefault(row["arm"], []).append(row)
    told = [f"{arm} ({'; '.join(_loss(row) for row in rows)})" for arm, rows in by_arm.items()]
    rest = [arm for arm in arms if arm not in by_arm and arm != BASE]
    more = f" No significant loss: {_names(rest)}." if rest else ""
    return [f"Forgot significantly: {', '.join(told)}.{more}"]


def _loss(row: Row) -> str:
    return f"{row['task']} {estimate(row['difference'], '+.3f')}"


def _versus(table: Scores) -> list[str]:
    """The arms against the chosen one, on the target."""
    rows = table.of(table.versus, "target") if table.versus else []
    words = {"better": "Better", "worse": "Worse"}
    found = []
    for verdict, word in words.items():
        chosen = [row for row in rows if row["verdict"] == verdict]
        if chosen:
            few = len(chosen) <= FEW
            named = [f"{row['arm']} {estimate(row['difference'], '+.3f')}" if few else row["arm"] for row in chosen]
            told = ", ".join(named) if few else _names(named)
            found.append(f"{word} than {table.versus} on {table.target}: {told}.")
    return found


def _open(table: Scores) -> list[str]:
    """What could not be told from chance, by name."""
    found = []
    for against in dict.fromkeys(row["against"] for row in table.contrasts):
        rows = [r for r in table.contrasts if r["against"] == against and r["verdict"] == "not significant"]
        rows = [r for r in rows if r["purpose"] != "probe"]
        total = sum(r["against"] == against and r["purpose"] != "probe" for r in table.contrasts)
        if rows:
            by_task: dict[str, list[str]] = {}
            for row in rows:
                by_task.setdefault(row["task"], []).append(row["arm"])
            told = "; ".join(f"{task}: {_names(names)}" for task, names in by_task.items())
            found.append(f"Not significant against {against} ({len(rows)} of {total} comparisons): {told}.")
    return found


def _names(names: Sequence[str]) -> str:
    names = list(names)
    return ", ".join(names) if len(names) <= MANY else f"{', '.join(names[:MANY])} and {len(names) - MANY} more"
