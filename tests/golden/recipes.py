"""Every shipped recipe of the embedded model, cut down to three steps of eight rollouts, and what it gives.

python -m tests.golden.recipes      # writes trajectories.json anew, after a change that is meant to change them
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from statewise import train
from statewise.recipe import Recipe, shipped_recipes
from statewise.run import RunDir

FILE = Path(__file__).with_name("trajectories.json")
NAMES = sorted(name for name in shipped_recipes() if not name.startswith("smollm2"))
STEPS = 3
COLUMNS = ("loss", "grad_norm", "tokens")
LIMITS = {"count": 24, "max_tokens": 64, "group_size": 4}


def make_teacher(path: Path) -> Path:
    """The embedded model after eight steps of SFT, as a run directory."""
    recipe = Recipe.load(
        "tiny_sft", ["source.count=128", "budget={max_steps=8}", "eval.tasks=[]", "model.dtype=float32"]
    )
    return train(recipe, path, quiet=True).path


def cut_down(value: Any, teacher: Path) -> Any:
    """Smaller numbers in a source, and the given teacher wherever a recipe asks for one."""
    if isinstance(value, list):
        return [cut_down(item, teacher) for item in value]
    if not isinstance(value, dict):
        return value
    small = {key: cut_down(item, teacher) for key, item in value.items()}
    small |= {key: min(value[key], most) for key, most in LIMITS.items() if key in value}
    return small | ({"teacher": str(teacher)} if value.get("teacher") == "runs/teacher" else {})


def small(name: str, teacher: Path, *changes: str) -> Recipe:
    plain = cut_down(Recipe.load(name).to_plain(), teacher)
    plain["model"] = {"path": "tiny", "dtype": "float32"}
    plain["batch"] = {**plain.get("batch", {}), "rollouts": 8, "micro_rows": 8}
    plain |= {"budget": {"max_steps": STEPS}, "checkpoint": {"every": 1, "keep_last": STEPS}}
    plain.pop("eval", None)
    return Recipe.from_plain(plain, changes, name=name)


def trajectory(run: RunDir) -> dict[str, list[float]]:
    """Of each column its value in every step; steps without anything to train have none."""
    rows = [row for row in run.metrics() if "total_tokens" in row]
    return {column: [row.get(column, 0.0) for row in rows] for column in COLUMNS}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        teacher = make_teacher(Path(folder) / "teacher")
        runs = {name: train(small(name, teacher), Path(folder) / name, quiet=True) for name in NAMES}
        FILE.write_text(json.dumps({name: trajectory(run) for name, run in runs.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
