"""`statewise geometry --trajectory`: runs over their checkpoints, as a table, files and a page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statewise.cli.output import print_json, print_table, say
from statewise.errors import Interrupted

if TYPE_CHECKING:
    from statewise.geometry.matrices import Selection
    from statewise.geometry.trajectory import Choices, Trajectory

Row = dict[str, Any]
WORTH_A_PROCESS = 50_000_000  # weights, all points counted
HEADINGS = {
    "step": "step",
    "delta_norm": "||D||",
    "relative_norm": "||D||/||W0||",
    "stable_rank": "stable rank",
    "hill": "Hill",
    "energy": "top-k energy",
    "sim_end": "Sim to end",
    "sim_end_shuffled": "shuffled",
    "sim_end_unrelated": "unrelated",
    "sim_part": "Sim of parts",
    "sim_random": "random",
}
LEAD = (
    "The update D_t = W_t - W_0 over the checkpoints of a run, matrix by matrix; means over matrices. A part is what "
    "happened between two checkpoints."
)
READING = (
    "Sim to the end rises to 1 whatever a training does, since D_t is a part of the end. Read it beside its nulls: "
    "shuffled, the same parts added in random order, and unrelated, parts whose columns were moved and flipped at random "
    "before they were added, which share nothing but the sum. A subspace has locked early where the run's curve is high "
    "long before the unrelated one is, and where parts are similar to the parts before them. Where parts shrink, as under "
    "a decaying learning rate, all but the shuffled curve rise early: the first parts are most of the sum.\n\n"
    "A curve locks at the progress from which on it stays at the threshold."
)


def trajectories_of(names: Sequence[str], selection: Selection) -> list[Trajectory]:
    """One a run; of names that are not all runs, a single one with the first as its start."""
    from statewise.geometry.trajectory import of_list, of_run

    if all((Path(name) / "run.json").is_file() for name in names):
        return [of_run(name, selection) for name in names]
    return [of_list(names, selection)]


def command(
    names: Sequence[str],
    selection: Selection,
    numbers: tuple[int, int, int, float],
    out: Path | None,
    workers: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Follow, write OUT/trajectory.{json,parquet,html} and print what was found. numbers: k, Hill's k, draws, threshold."""
    from statewise.cli.geometry import Bar
    from statewise.geometry.follow import follow, key_of, summary
    from statewise.geometry.trajectory import Choices

    choices, followed = Choices(*numbers), trajectories_of(names, selection)
    target = out or Path("geometry") / f"trajectory-{key_of(followed, choices)}"
    for t in () if quiet else followed:
        say(f"{t.label}: {len(t.matrices)} matrices at steps {', '.join(map(str, t.steps))} -> {target}")
        for note in t.notes:
            say(f"note: {note}")
    with Bar(quiet) as bar:
        try:
            rows = follow(followed, choices, target, workers or default_workers(followed), bar.update)
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; the same command goes on with what {target} holds.") from None
    found = summary(followed, choices, rows)
    page = write_page(found, choices, target)
    if as_json:
        return print_json({**found, "out": target, "page": page})
    print_summary(found, choices)
    print(f"\n{page}, trajectory.parquet, trajectory.json")


def default_workers(followed: Sequence[Trajectory]) -> int:
    """Starting processes takes seconds: one for each core only where there is more to do than that."""
    weights = sum(matrix.entries * len(t.points) for t in followed for matrix in t.matrices)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if weights > WORTH_A_PROCESS else 1


def write_page(found: dict[str, Any], choices: Choices, target: Path) -> Path:
    """The panels of all runs, and a table of each."""
    from statewise.geometry.panels import trajectory_panels
    from statewise.report import page

    names = short_names([r["label"] for r in found["runs"]])
    rows = {name: r["means"] for name, r in zip(names, found["runs"], strict=True)}
    figure = trajectory_panels(rows, choices.k, choices.hill_k)
    columns, lock_rows = lock_table(found, names, choices)
    blocks: list[page.Block] = [
        page.Figure(figure, f"Dashed: shuffled. Dotted: unrelated parts, random subspaces. {in_words(choices)}."),
        page.Table(columns, lock_rows, "Where each curve locks"),
        page.Paragraph(READING),
    ]
    sections = [page.Section("Over the run", blocks)]
    for name, r in zip(names, found["runs"], strict=True):
        table = page.Table(list(HEADINGS.values()), table_of(r["means"], choices), "Means over matrices")
        notes = [page.Paragraph(note, "note") for note in r["notes"]]
        sections.append(page.Section(name, [page.Paragraph(f"{r['label']}, from {r['start']}"), table, *notes]))
    return page.write_page(target / "trajectory.html", "Trajectory of the update", LEAD, sections)


def print_summary(found: dict[str, Any], choices: Choices) -> None:
    for r in found["runs"]:
        print(f"\n{r['label']}, from {r['start']}: means over {r['num_matrices']} matrices")
        print_table(list(HEADINGS.values()), table_of(r["means"], choices))
    print()
    columns, rows = lock_table(found, short_names([r["label"] for r in found["runs"]]), choices)
    print_table(columns, rows)
    print(f"\n{in_words(choices)}")


def table_of(rows: Sequence[Row], choices: Choices) -> list[list[Any]]:
    energy = f"top_{choices.k}_energy"
    return [[row.get(energy if name == "energy" else name) for name in HEADINGS] for row in rows]


def lock_table(found: dict[str, Any], names: Sequence[str], choices: Choices) -> tuple[list[str], list[list[Any]]]:
    """Progress in % at which each curve locks."""
    kinds = {
        "sim_end": "run",
        "median": "median matrix",
        "sim_end_shuffled": "shuffled",
        "sim_end_unrelated": "unrelated",
    }
    rows = [
        [name, *(None if r["locks"].get(k) is None else 100 * r["locks"][k] for k in kinds)]
        for name, r in zip(names, found["runs"], strict=True)
    ]
    return [f"locks at Sim >= {choices.threshold:g}, % of progress", *kinds.values()], rows


def in_words(choices: Choices) -> str:
    return (
        f"K = {choices.k} right singular vectors; Hill over {choices.hill_k} values; {choices.draws} draws of each null, "
        f"seed {choices.seed}"
    )


def short_names(labels: Sequence[str]) -> list[str]:
    """Labels without the directories that all share."""
    shared = (
        os.path.commonpath([os.path.dirname(label) for label in labels])
        if len(labels) > 1
        else os.path.dirname(labels[0])
    )
    return [os.path.relpath(label, shared) if shared else label for label in labels]
