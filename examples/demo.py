"""Four trainings of the embedded model from one base, and what each gained and forgot.

    python examples/demo.py [--out runs/demo]

Mild SFT, stress SFT, and the stress data with the DFT and IDFT weights. A run that is there already is not repeated.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from statewise import Recipe, train
from statewise.run import RunDir

RECIPES = ("tiny_sft", "tiny_stress", "tiny_dft", "tiny_idft")
TASKS = {"tiny:math": "target: math", "tiny:facts": "retention: facts", "tiny:beliefs": "retention: beliefs"}
TEXT = "tiny:text"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    out = parser.parse_args().out
    started = time.perf_counter()
    runs = {}
    for index, name in enumerate(RECIPES):
        # All start from the same base, so it is evaluated once.
        recipe = Recipe.load(name, [] if index == 0 else ["eval.at_start=false"])
        print(f"\n== {name}", *recipe.explain()[:3], sep="\n", flush=True)
        runs[name] = train(recipe, out / name, resume=(out / name / "run.json").is_file())
    print(f"\n{table(runs)}\n\n{time.perf_counter() - started:.0f} seconds; the runs are in {out}.")
    print("Shares of right answers with 95 % intervals; text is cross-entropy in nats a token, lower is better.")


def table(runs: dict[str, RunDir]) -> str:
    """Base and runs as rows, tasks as columns."""
    rows = [["", *TASKS.values(), "text"]]
    first = next(iter(runs.values()))
    rows.append(["base", *scores(first.evals()[0])])
    for name, run in runs.items():
        evals = run.evals()
        rows.append([name, *scores(evals[max(evals)])])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def scores(evals: dict[str, dict[str, float]]) -> list[str]:
    texts = [f"{evals[t]['mean']:.3f} [{evals[t]['low']:.3f}, {evals[t]['high']:.3f}]" for t in TASKS]
    return [*texts, f"{evals[TEXT]['mean']:.3f}"]


if __name__ == "__main__":
    main()
