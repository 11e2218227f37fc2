"""`statewise drift`: how far, and where, a policy moved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from statewise.cli.output import print_json, print_table, say
from statewise.errors import RecipeError
from statewise.estimates import interval, number

if TYPE_CHECKING:
    from statewise.drift.measure import Drift, DriftSettings

FEATURES = ("lexical", "hidden")
PROMPTS = ("tiny:math:count=32", "tiny:facts:count=32")  # where none are named


def command(
    policies: list[str] = typer.Argument(
        None,
        help="POLICY_A POLICY_B: tiny, a directory, a hub id or a run; or one run, against the model it started from.",
    ),
    prompts: list[str] = typer.Option([], help="FILE or KIND, with :key=value,...; several are several sources."),
    count: int = typer.Option(64, min=1, help="Prompts of each source, unless it says so itself."),
    task: list[str] = typer.Option([], help="KIND:key=value,...: retention tasks; default: those of the run."),
    limit: int = typer.Option(100, min=1, help="Examples of each retention task."),
    rollouts: int = typer.Option(2, min=1, help="Rollouts a prompt and policy."),
    positions: int = typer.Option(4, min=1, help="Prefixes sampled from each rollout."),
    max_tokens: int = typer.Option(128, min=1, help="Of a rollout."),
    temperature: float = typer.Option(1.0, min=0, help="Of the rollouts; 0 is greedy."),
    features: str = typer.Option("lexical,hidden", help="lexical, hidden, or both with a comma."),
    encoder: str = typer.Option(None, help="A model whose hidden states are the features; default: policy A."),
    permutations: int = typer.Option(500, min=1, help="Of the p-values."),
    seed: int = typer.Option(0, help="Of rollouts, prefixes, projections and permutations."),
    study: list[Path] = typer.Option([], help="A study, a run or a directory of runs: measure all, rank the measures."),
    again: bool = typer.Option(False, "--again", help="With --study: measure anew what is measured."),
    out: Path = typer.Option(None, help="Where results go; default: diagnostics/ of the run that is measured."),
    device: str = typer.Option(None, help="cpu, cuda, cuda:1 ...; default: cuda where there is one."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Drift between two policies on fixed prompts.

    Distances of the states they visit (MMD, sliced Wasserstein, centroid, Jaccard), KL at single states (their own, the
    training data's, the retention tasks'), and how reachable the training states were.
    """
    from statewise.drift.measure import DriftSettings

    kinds = tuple(part.strip() for part in features.split(",") if part.strip())
    for kind in kinds:
        if kind not in FEATURES:
            raise RecipeError(f"--features: received '{kind}', expected some of {', '.join(FEATURES)}.")
    settings = DriftSettings(rollouts, positions, max_tokens, temperature, kinds, permutations, seed=seed)
    job = _Job([_source(text, count) for text in prompts or PROMPTS], settings, limit, device or _device(), encoder)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # what can't be written is said before anything is measured
    if study:
        return _rank(job, study, again, out, as_json)
    drift = job.of_run(policies[0], out) if len(policies or []) == 1 else job.of_pair(policies or [], task, out)
    if as_json:
        return print_json(drift.result)
    print_drift(drift)


class _Job:
    """What is measured, and how."""

    def __init__(
        self,
        sources: list[dict[str, Any]],
        settings: DriftSettings,
        limit: int,
        device: str | None,
        encoder: str | None,
    ):
        self.sources, self.settings, self.limit = sources, settings, limit
        self.device, self.encoder = device, encoder

    def runs(self) -> Any:
        from statewise.drift.runs import RunDrift

        _hide_noise()
        how = {"limit": self.limit, "device": self.device, "encoder": self.encoder}
        return RunDrift(self.sources, self.settings, tell=say, **how)  # type: ignore[arg-type]

    def of_run(self, run: str, out: Path | None) -> Drift:
        if not (Path(run) / "run.json").is_file():
            raise RecipeError(f"drift: received '{run}' alone, which is no run; expected POLICY_A POLICY_B, or a run.")
        found: Drift = self.runs().measure(run, out)
        return found

    def of_pair(self, policies: list[str], tasks: list[str], out: Path | None) -> Drift:
        if len(policies) != 2:
            raise RecipeError(f"drift: received {len(policies)} policies, expected POLICY_A POLICY_B, or one run.")
        from statewise.cli.words import parse_task
        from statewise.drift.measure import measure_drift
        from statewise.drift.runs import load, reading_context, retention_texts, texts_of, write
        from statewise.drift.states import fixed_prompts
        from statewise.run import RunDir

        _hide_noise()
        say(f"loading {policies[0]} and {policies[1]}")
        a, b = (load(policy, device=self.device) for policy in policies)
        run = next((p for p in reversed(policies) if (Path(p) / "run.json").is_file()), None)
        if tasks:
            texts = texts_of([parse_task(t) for t in tasks], reading_context(a, Path("."), self.limit))
        else:
            texts = retention_texts(RunDir.open(run).recipe(), a, self.limit) if run else {}
        drift = measure_drift(
            a,
            b,
            fixed_prompts(a, self.sources, self.settings.seed),
            self.settings,
            encoder=load(self.encoder, device=self.device) if self.encoder else None,
            retention=texts,
            tell=say,
        )
        drift.result.update(a=policies[0], b=policies[1])
        if out is not None:
            write(drift, out)
        return drift


def _rank(job: _Job, places: list[Path], again: bool, out: Path | None, as_json: bool) -> None:
    from statewise.drift import ranking
    from statewise.drift.runs import read
    from statewise.files import atomic_write, to_json

    found = [run for place in places for run in _runs_at(place)]
    if len({run.arm for run in found}) < 3:
        raise RecipeError(
            f"--study: found runs of {len({r.arm for r in found})} methods; a ranking needs at least three."
        )
    measurer = job.runs()
    for place, run in enumerate(found, 1):
        if again or read(run.run) is None:
            say(f"{place} of {len(found)}: {run.run}")
            measurer.measure(run.run, base=run.model)
    points = ranking.points(found)
    ranked = ranking.rank(points)
    plain = ranking.to_plain(points, ranked)
    if out is not None:
        atomic_write(out / "drift_ranking.json", to_json(plain, indent=2) + "\n")
    if as_json:
        return print_json(plain)
    columns = ["measure", "Spearman with forgetting [95 %]", "over arms", "without the worst arm", ""]
    rows = [
        [
            r.measure,
            interval(r.rho, r.low, r.high, "+.2f"),
            number(r.rho_of_arms, "+.2f"),
            number(r.rho_without_worst, "+.2f"),
            r.verdict,
        ]
        for r in ranked
    ]
    print_table(columns, rows)
    print(f"{len(points)} runs of {len({p.arm for p in points})} methods; intervals: bootstrap of whole methods")


def _runs_at(place: Path) -> list[Any]:
    """The completed runs of a study, of a directory of runs, or the run itself, each with its method and base."""
    from statewise.drift.ranking import Studied
    from statewise.evals.from_runs import same_but_seed

    if (place / "plan.json").is_file():
        from statewise.drift.runs import first_model
        from statewise.study.results import read_study

        study = read_study(place)
        return [
            Studied(r.arm, r.path, base=r.base, model=first_model(r.path), purposes=study.purposes)
            for arm in study.arms
            for r in study.of(arm)
        ]
    files = [f for pattern in ("run.json", "*/run.json", "*/*/run.json") for f in sorted(place.glob(pattern))]
    groups = same_but_seed([f.parent for f in files])
    return [Studied(str(group[0]), run) for group in groups for run in group]


def _source(text: str, count: int) -> dict[str, Any]:
    """`tiny:math:count=32` or `FILE:split=train` as settings of a data set; the split is "test" by default."""
    from statewise.cli.words import split_settings

    data, sign, rest = text.rpartition(":")
    if not sign or "=" not in rest:
        data, rest = text, ""
    own = "count" if data.startswith("tiny:") else "limit"
    return {own: count, "split": "test", **(split_settings(rest) if rest else {}), "data": data}


def _device() -> str | None:
    import torch

    return "cuda" if torch.cuda.is_available() else None


def _hide_noise() -> None:
    from statewise.training.progress import hide_library_noise

    hide_library_noise()


def print_drift(drift: Drift) -> None:
    """For people: distances with their noise, KL by kind of state, reachability."""
    found = drift.result
    print(f"from {found['a']} to {found['b']}, {found['settings']['prompts']} prompts")
    rows = []
    for name, told in found["features"].items():
        for kernel in told["mmd_grid"]:
            label = f"{name} MMD^2, h = {kernel['bandwidth']:.3g}" + (" (median rule)" if kernel == told["mmd"] else "")
            noise = [kernel["null_mean"], kernel["null_q95"]]
            rows.append([label, kernel["mmd2_biased"], kernel["mmd2_unbiased"], kernel["p"], *noise])
        for other in ("sliced_wasserstein", "centroid"):
            rows.append([f"{name} {other.replace('_', ' ')}", *_cells(told[other])])
    rows.append(["Jaccard of words", *_cells(found["jaccard"])])
    print_table(["distance", "value", "unbiased", "p", "noise, mean", "noise, 95 %"], rows)
    print()
    kl = [
        [where.replace("_", " "), told["states"], told["kl_ab"], told["kl_ab_se"], told["kl_ba"], told["kl_ba_se"]]
        for where, told in found["kl"].items()
    ]
    print_table(["KL at, nats a state", "states", "KL(A, B)", "se", "KL(B, A)", "se"], kl)
    if found["reachability"]:
        print("\ntraining states under A: " + ", ".join(f"{k} {v:.4g}" for k, v in found["reachability"].items()))


def _cells(told: dict[str, Any]) -> list[Any]:
    return [told["value"], None, told["p_value"], told["null_mean"], told["null_q95"]]
