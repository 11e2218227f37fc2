"""What a report shows beside scores: budgets, recipe differences, curves, completions, cards, warnings."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from statewise.evals.from_runs import repeated
from statewise.report.reading import Planned, RunView

Row = dict[str, Any]
# Metrics that are drawn where runs have them, in this order: words and unit.
CURVES = {
    "loss": ("Loss", "loss"),
    "nll": ("Cross-entropy of the trained tokens", "nats"),
    "reward": ("Mean reward", "reward"),
    "phi": ("Centred log-likelihood of the trained tokens: phi = log p + H, 0 where typical of the model", "nats"),
    "entropy": ("Entropy at the trained tokens", "nats"),
    "completion_tokens": ("Length of a sampled completion", "tokens"),
    "grad_norm": ("Gradient norm before clipping", "norm"),
}
GEOMETRY = "geometry/"
MAX_POINTS = 200  # of a curve
MAX_COMPLETIONS = 120
SPENT = ("step", "tokens", "generated_tokens", "teacher_tokens", "flops", "seconds")


def names_of(views: Sequence[RunView]) -> dict[str, str]:
    """{path of a run: its name}, so that a teacher's path is told as the run that it is."""
    return {spelled: view.name for view in views for spelled in _spellings(view.path)}


def _spellings(path: Path) -> set[str]:
    return {str(path), str(path.resolve()), os.path.relpath(path)}


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """`value` with the paths of known runs replaced by their names, in all texts; longer paths first."""
    if isinstance(value, str):
        for path in sorted(names, key=len, reverse=True):
            value = value.replace(path, names[path])
        return value
    if isinstance(value, Mapping):
        return {key: renamed(item, names) for key, item in value.items()}
    return [renamed(item, names) for item in value] if isinstance(value, list | tuple) else value


def warnings(runs: Sequence[RunView | Planned]) -> list[str]:
    """What a reader must know: runs that failed, are not done, raised an alarm, or repeat a seed."""
    found: dict[tuple[str, str], list[int]] = {}
    for run in runs:
        for text in _warnings_of(run):
            found.setdefault((run.arm, text), []).append(run.seed)
    return [
        f"{arm}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}: {text}"
        for (arm, text), seeds in found.items()
    ] + _repeated([run for run in runs if isinstance(run, RunView)])


def _repeated(views: Sequence[RunView]) -> list[str]:
    found = repeated((view.arm, view.seed) for view in views if view.status == "completed")
    return [
        f"{arm}: seed {seed} is there {count} times; a repeated seed is no new evidence, so intervals are too narrow."
        for (arm, seed), count in found.items()
    ]


def _warnings_of(run: RunView | Planned) -> list[str]:
    if isinstance(run, Planned):
        return ["not run yet."]
    if run.status != "completed":
        return [f"{run.status}: {run.info['error']}" if run.info.get("error") else f"{run.status}."]
    return list(run.info.get("warnings", []))


def evaluated(views: Sequence[RunView], arms: Sequence[str]) -> str:
    """Which evaluations the scores are of, arm by arm; empty where no run has more than one after training."""
    told = {arm: list(dict.fromkeys(v.evaluation for v in views if v.arm == arm and v.evaluation)) for arm in arms}
    said = "; ".join(f"{arm}: {', '.join(found)}" for arm, found in told.items() if found)
    return f"Scores are of the evaluation {said}." if said else ""


def budgets(views: Sequence[RunView], arms: Sequence[str]) -> list[Row]:
    """A row an arm: what its runs used, as means over seeds."""
    rows = []
    for arm in arms:
        runs = [view for view in views if view.arm == arm and view.is_run and view.status == "completed"]
        if runs:
            spent = [run.info.get("spent") or {} for run in runs]
            used = {name: fmean(float(s.get(name, 0)) for s in spent) for name in SPENT}
            walls = [seconds for run in runs if (seconds := _wall(run.info)) is not None]
            rows.append({"arm": arm, "seeds": len(runs), **used, "wall_seconds": fmean(walls) if walls else None})
    return rows


def _wall(info: Mapping[str, Any]) -> float | None:
    if not info.get("started") or not info.get("ended"):
        return None
    return (datetime.fromisoformat(info["ended"]) - datetime.fromisoformat(info["started"])).total_seconds()


def differences(views: Sequence[RunView], arms: Sequence[str], names: Mapping[str, str]) -> list[Row]:
    """{"setting", arm: value ...} for every recipe setting in which arms differ; seeds are left out."""
    firsts = {arm: next((v for v in views if v.arm == arm and v.is_run), None) for arm in arms}
    flat = {arm: dict(_flat(renamed(view.recipe, _arm_names(views, names)))) for arm, view in firsts.items() if view}
    keys = dict.fromkeys(key for table in flat.values() for key in table if key != "seed")
    differing = [key for key in keys if len({json.dumps(table.get(key)) for table in flat.values()}) > 1]
    return [{"setting": key, "values": {arm: table.get(key) for arm, table in flat.items()}} for key in differing]


def _arm_names(views: Sequence[RunView], names: Mapping[str, str]) -> dict[str, str]:
    """As `names`, but without the seed, which differs between runs of an arm."""
    arms = {view.name: view.arm for view in views}
    return {path: arms[name] for path, name in names.items()}


def _flat(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in _flat(item, f"{path}.{key}" if path else str(key))]
    if isinstance(value, list) and value and all(isinstance(item, dict | list) for item in value):
        return [pair for index, item in enumerate(value) for pair in _flat(item, f"{path}.{index}")]
    return [(path, value)]


def curves(views: Sequence[RunView]) -> dict[str, list[Row]]:
    """{metric: a curve a run over trained tokens}, thinned, and the scores of evaluations inside runs."""
    found: dict[str, list[Row]] = {}
    for view in views:
        steps = [row for row in view.metrics if "step_seconds" in row]
        for name in [*CURVES, *_geometry(steps)]:
            points = [(row.get("total_tokens", row["step"]), row[name]) for row in steps if row.get(name) is not None]
            if len(points) > 1:
                found.setdefault(name, []).append(_curve(view, _thinned(points)))
        for name, points in _scores_on_the_way(view, steps).items():
            found.setdefault(name, []).append(_curve(view, points))
    known = [name for name in CURVES if name in found]
    return {name: found[name] for name in [*known, *(name for name in found if name not in CURVES)]}


def _geometry(steps: Sequence[Row]) -> list[str]:
    """Metrics of the weights that the run measured while it trained."""
    return list(dict.fromkeys(name for row in steps for name in row if name.startswith(GEOMETRY)))


def _scores_on_the_way(view: RunView, steps: Sequence[Row]) -> dict[str, list[tuple[Any, Any]]]:
    """{"eval/task": (trained tokens, score)} where a run was evaluated between its start and its end."""
    tokens = {0: 0} | {row["step"]: row.get("total_tokens", row["step"]) for row in steps}
    found: dict[str, list[tuple[Any, Any]]] = {}
    for row in view.metrics:
        for name, value in row.items():
            if name.startswith("eval/") and name.count("/") == 1 and value is not None and row["step"] in tokens:
                found.setdefault(name, []).append((tokens[row["step"]], value))
    return {name: points for name, points in found.items() if len(points) > 2}


def _curve(view: RunView, points: Sequence[tuple[float, float]]) -> Row:
    return {"arm": view.arm, "seed": view.seed, "x": [x for x, _ in points], "y": [round(y, 6) for _, y in points]}


def _thinned(points: list[tuple[Any, Any]]) -> list[tuple[float, float]]:
    """At most MAX_POINTS, each the mean of its neighbours."""
    width = -(-len(points) // MAX_POINTS)
    parts = [points[i : i + width] for i in range(0, len(points), width)]
    return [(part[-1][0], fmean(y for _, y in part)) for part in parts]


def completions(views: Sequence[RunView], arms: Sequence[str], target: str | None) -> list[Row]:
    """Answers before and after, of each arm's first seed, the arms in turn; those whose score changed come first.

    Of the target where its records hold answers, else of the first task whose records do.
    """
    firsts = [next((v for v in views if v.arm == arm and v.scores and v.base), None) for arm in arms]
    shown = [view for view in firsts if view is not None]
    found = [_answers(view, target, MAX_COMPLETIONS // len(shown)) for view in shown]
    return [row for turn in zip_longest(*found) for row in turn if row is not None]


def _answers(view: RunView, target: str | None, limit: int) -> list[Row]:
    scores, base = view.scores or {}, view.base or {}
    names = sorted(scores, key=lambda name: name != target)
    task = next((n for n in names if n in base and scores[n].records and "response" in scores[n].records[0]), None)
    if task is None:
        return []
    before = {record["id"]: record for record in base[task].records}
    pairs = [(before[record["id"]], record) for record in scores[task].records if record["id"] in before]
    pairs.sort(key=lambda pair: pair[0]["score"] == pair[1]["score"])
    return [
        {
            "arm": view.arm,
            "task": task,
            "id": after["id"],
            "prompt": _text(after.get("prompt")),
            "reference": _text(after.get("reference")),
            "before": _text(old.get("response")),
            "after": _text(after.get("response")),
            "scores": [old["score"], after["score"]],
        }
        for old, after in pairs[: max(limit, 1)]
    ]


def _text(value: Any) -> str:
    """A prompt or answer as text: messages one under the other, several answers too."""
    if isinstance(value, list):
        return "\n".join(_text(item) for item in value)
    if isinstance(value, Mapping):
        role = value.get("role", "")
        return str(value.get("content", "")) if role == "user" else f"[{role}] {value.get('content', '')}"
    return "" if value is None else str(value)


def cards(views: Sequence[RunView], arms: Sequence[str], names: Mapping[str, str]) -> list[Row]:
    """An arm's method in words, its data, and a row a run; what differs between runs stands in the rows."""
    found = []
    for arm in arms:
        runs = [view for view in views if view.arm == arm]
        if runs:
            first = runs[0].info
            method = [renamed(line, _arm_names(views, names)) for line in first.get("method", [])]
            found.append(
                {
                    "arm": arm,
                    "method": [line.rpartition("; seed ")[0] or line for line in method],
                    "data": first.get("data", []),
                    "versions": first.get("versions", {}),
                    "hardware": first.get("hardware", {}),
                    "runs": [_run_row(view) for view in runs],
                }
            )
    return found


def _run_row(view: RunView) -> Row:
    spent = view.info.get("spent") or {}
    return {
        "seed": view.seed,
        "status": view.status,
        "recipe_hash": view.info.get("recipe_hash"),
        "steps": spent.get("step"),
        "tokens": spent.get("tokens"),
        "started": view.info.get("started"),
        "run": view.path.name,
    }


def diagnostic_tables(views: Sequence[RunView]) -> dict[str, list[Row]]:
    """{table: rows of all runs, with arm and seed in front}."""
    found: dict[str, list[Row]] = {}
    for view in views:
        for name, rows in view.diagnostics.items():
            if "measures" in rows[0]:  # drift, which has a section of its own
                continue
            found.setdefault(name, []).extend({"arm": view.arm, "seed": view.seed, **row} for row in rows)
    return found
