"""`statewise detect`: whether two data sets differ in on-policyness, and whether they are the model's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from statewise.cli.output import estimate, print_json, print_table, say
from statewise.cli.score import BATCH_TOKENS, MODEL, OUT, default_out, engine_of, meter_of
from statewise.errors import RecipeError

DATA = (
    "Two data sets (see `statewise score`), or directories that `score` wrote; then settings of the source 'dataset': "
    "KEY=VALUE for both, a.KEY=VALUE or b.KEY=VALUE for one."
)


def command(
    words: list[str] = typer.Argument(..., metavar="A B [KEY=VALUE]...", help=DATA),
    model: str = typer.Option(None, help=MODEL + " Not needed for directories of scores."),
    out: Path = typer.Option(None, help="Directory for detect.json, report.html and new scores; " + OUT),
    other_model: str = typer.Option(None, help="What B was sampled from: adds KL(q || p) and H(q) - H(p)."),
    temperature: float = typer.Option(1.0, help="Logits are divided by it before all statistics."),
    dtype: str = typer.Option("auto", help="Of the model: auto, float32, bfloat16, float16. Statistics are float32."),
    limit: int = typer.Option(10_000, min=2, help="Samples of each set that are compared."),
    batch_tokens: int = BATCH_TOKENS,
    processes: int = typer.Option(1, min=1, help="Processes that score."),
    device: str = typer.Option(None, help="cpu, cuda, cuda:1 ...; default: cuda where there is one."),
    quiet: bool = typer.Option(False, "--quiet", help="Show no progress."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Compare data set A with B: which is the model's own, how far off is the other, and which statistic tells them apart."""
    sets = _sets(words)
    chosen = {"model": model or "", "b": sets, "temperature": temperature, "dtype": dtype, "limit": limit}
    out = out or default_out("scores", sets[0]["data"], chosen)
    if not quiet:
        say(f"comparing {sets[0]['data']} with {sets[1]['data']}")
    from statewise.onpolicy.detect import detect
    from statewise.onpolicy.scoring import is_scores

    a, b = (s["data"] if is_scores(Path(s["data"])) else s for s in sets)
    found = detect(
        a,
        b,
        model if model is None else {"path": model, "dtype": dtype},
        out=out,
        other_model=other_model,
        limit=limit,
        engine=engine_of(processes, "local", None, device),
        meter=meter_of("done", quiet),
        temperature=temperature,
        batch_tokens=batch_tokens,
    )
    if as_json:
        return print_json(found)
    for letter, text in zip(("A: ", "B: ", "", ""), found["verdict"], strict=False):
        print(f"{letter}{text}\n")
    _print_statistics(found["statistics"])
    print(f"\n{out}/report.html")


def _sets(words: Sequence[str]) -> list[dict[str, Any]]:
    """Fields of the source 'dataset' for A and for B."""
    from statewise.overrides import apply_overrides
    from statewise.sources.dataset import DatasetSource

    paths = [w for w in words if "=" not in w or Path(w).exists()]
    wrong = next((p for p in paths if p.startswith("--")), None)
    if wrong is not None:
        raise RecipeError(f"unknown option '{wrong}'; see --help.")
    if len(paths) != 2:
        raise RecipeError(f"received the data sets {paths}, expected two; a setting is KEY=VALUE.")
    fields = [name for name in DatasetSource.model_fields if name not in ("data", "shuffle")]
    plain = apply_overrides({}, [w for w in words if w not in paths], [*fields, "a", "b"])
    own = {letter: plain.pop(letter, {}) for letter in "ab"}
    return [{"data": path, **plain, **own[letter]} for path, letter in zip(paths, "ab", strict=True)]


def _print_statistics(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        ["level", "statistic", "A", "B", "AUC [95 %]", "SNR [95 %]"],
        [[r["level"], r["statistic"], r["mean_a"], r["mean_b"], estimate(r["auc"]), estimate(r["snr"])] for r in rows],
    )
