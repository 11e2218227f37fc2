"""Drift of runs: the base model against the last checkpoint, on the recipe's own tasks and training states."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from statewise.drift.measure import Drift, DriftSettings, measure_drift, visits_of
from statewise.drift.states import DriftPrompt, fixed_prompts
from statewise.errors import RunError, StatewiseError
from statewise.evals.states import TaskText, task_texts
from statewise.files import atomic_write, to_json
from statewise.recipe import Recipe
from statewise.run import RunDir
from statewise.settings import ModelSettings
from statewise.types import EvalContext, Rollout, World

RESULT, STATES = "drift.json", "drift_states.parquet"
STEPS_SEEN = 4  # training states are drawn at so many steps, spread over the run


class RunDrift:
    """Measures runs that share a base model, which is loaded and sampled once.

    prompts: settings of data sets (see `fixed_prompts`). limit: examples of each retention task; rollouts: training rollouts.
    """

    def __init__(
        self,
        prompts: Sequence[dict[str, Any]],
        settings: DriftSettings | None = None,
        *,
        limit: int = 100,
        rollouts: int = 64,
        device: str | None = None,
        encoder: str | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ):
        self.sources, self.settings = list(prompts), settings or DriftSettings()
        self.limit, self.rollouts, self.device, self.tell = limit, rollouts, device, tell
        self.encoder = load(encoder, device=device) if encoder else None
        self._opened: dict[str, tuple[Any, list[DriftPrompt], Any]] = {}

    def measure(self, path: str | Path, out: Path | None = None, *, base: ModelSettings | None = None) -> Drift:
        """Measure a run's last checkpoint; write drift.json and drift_states.parquet into `out` (default: diagnostics/).

        base: what it is measured against (default: the model that it started from). Raises RunError where the run has no
        checkpoint.
        """
        run = RunDir.open(path)
        checkpoints = run.checkpoints()
        if not checkpoints:
            raise RunError(
                f"{path}: has no checkpoint (status {run.status}), so there is no policy to compare; train it."
            )
        recipe = run.recipe()
        before, prompts, visits = self._base(base or recipe.model)
        after = load(str(checkpoints[max(checkpoints)]), recipe.model.dtype, self.device)
        training, missing = self._training(recipe, before)
        drift = measure_drift(
            before,
            after,
            prompts,
            self.settings,
            encoder=self.encoder,
            retention=retention_texts(recipe, before, self.limit),
            training=training,
            visits_a=visits,
            tell=self.tell,
        )
        names = {"a": (base or recipe.model).path, "b": str(path), "step": max(checkpoints), "recipe_hash": recipe.hash}
        drift = replace(drift, result={**names, "training_states": missing or len(training), **drift.result})
        write(drift, out or run.path / "diagnostics")
        return drift

    def _base(self, model: Any) -> tuple[Any, list[DriftPrompt], Any]:
        """The model that a run started from, and the states it visits; the last one opened is kept."""
        from statewise.models.load import load_policy

        wanted = model.model_copy(update={"adapter": _trained_adapter(model)})
        key = wanted.model_dump_json(exclude={"gradient_checkpointing"})
        if key not in self._opened:
            self.tell(f"loading {model.path}")
            base = load_policy(wanted, device=self.device)
            prompts = fixed_prompts(base, self.sources, self.settings.seed)
            self._opened = {key: (base, prompts, visits_of(base, prompts, self.settings, "a"))}
        return self._opened[key]

    def _training(self, recipe: Recipe, base: Any) -> tuple[list[Rollout], str]:
        """Rollouts of the run's source, and why there are none."""
        try:
            return training_rollouts(recipe, base, self.rollouts, self.device), ""
        except StatewiseError as error:
            self.tell(f"training states can't be drawn again: {error}")
            return [], str(error)


def _trained_adapter(model: Any) -> Any:
    """An adapter that the run started from; one that it made itself changed nothing at the start."""
    return model.adapter if model.adapter is not None and model.adapter.path is not None else None


def first_model(run: str | Path) -> ModelSettings:
    """The model at the start of a chain of runs, each of which started from the one before."""
    model = RunDir.open(run).recipe().model
    seen: set[str] = set()
    while (Path(model.path) / "run.json").is_file() and model.path not in seen:
        seen.add(model.path)
        model = RunDir.open(model.path).recipe().model
    return model


def load(path: str, dtype: str = "auto", device: str | None = None) -> Any:
    """A LoadedPolicy of a checkpoint, a model directory, a hub id, a run (its last checkpoint) or "tiny"."""
    from statewise.models.load import load_policy
    from statewise.training.opened import directory_of

    return load_policy(ModelSettings(path=directory_of(path), dtype=_dtype(path, dtype)), device=device)


def _dtype(path: str, dtype: str) -> Any:
    """The embedded base is stored in bf16 and computed in float32."""
    return "float32" if path == "tiny" and dtype == "auto" else dtype


def retention_texts(recipe: Recipe, policy: Any, limit: int) -> dict[str, list[TaskText]]:
    """Examples of the recipe's retention tasks, by task."""
    context = reading_context(policy, recipe.base_dir, limit)
    return texts_of([t for t in recipe.eval.tasks if _purpose(t) == "retention"], context)


def reading_context(policy: Any, base_dir: Path, limit: int) -> EvalContext:
    """Enough to read the examples of tasks."""
    from statewise.models.generate import InProcessSampler
    from statewise.models.score import InProcessScorer

    sampler = InProcessSampler(policy.model, pad_id=policy.pad_id)
    scorer = InProcessScorer(policy.model, pad_id=policy.pad_id)
    return EvalContext(policy.model, policy.tokenizer, sampler, scorer, base_dir=base_dir, limit=limit)


def texts_of(tasks: Sequence[Any], context: EvalContext) -> dict[str, list[TaskText]]:
    """{task: its examples}, without tasks whose examples are not known."""
    from statewise.evals.results import task_name

    found = {task_name(task): task_texts(task, context)[: context.limit] for task in tasks}
    return {name: texts for name, texts in found.items() if texts}


def _purpose(task: Any) -> str:
    return str(getattr(task, "purpose", None) or getattr(task, "usual_purpose", "retention"))


def training_rollouts(recipe: Recipe, policy: Any, count: int, device: str | None = None) -> list[Rollout]:
    """About `count` of the rollouts that the recipe trains on, spread over its steps.

    Those of data are the very ones. A source that samples from the policy gives them with the weights given here, so
    that they are the states of the start of training.
    """
    from statewise.models.generate import InProcessSampler
    from statewise.models.score import InProcessScorer
    from statewise.training.budget import num_steps
    from statewise.training.opened import Models

    plain = recipe.model_copy(update={"model": recipe.model.model_copy(update={"adapter": None})})  # as `policy` is
    models = Models(plain, policy, policy.model, [], device or "cpu", {})
    world = World(
        tokenizer=policy.tokenizer,
        seed=recipe.seed,
        policy=policy.model,
        sampler=InProcessSampler(policy.model, pad_id=policy.pad_id),
        scorer=InProcessScorer(policy.model, pad_id=policy.pad_id),
        open_model=models,
        reads=recipe.reads(),
        device=device or "cpu",
        base_dir=recipe.base_dir,
    )
    examples = recipe.source.num_examples(world)
    total = num_steps(recipe.budget, recipe.batch, examples) or 1
    steps = sorted({round(i * (total - 1) / max(STEPS_SEEN - 1, 1)) for i in range(STEPS_SEEN)})
    share = -(-count // len(steps))
    found = []
    for step in steps:
        rollouts = recipe.source.sample(step, recipe.batch.rollouts, replace(world, step=step, progress=step / total))
        stride = max(1, len(rollouts) // share)
        found += rollouts[::stride][:share]
    return [r for r in found if r.num_action_tokens]


def write(drift: Drift, directory: Path) -> None:
    """`drift.json`, and a row a state in `drift_states.parquet`."""
    import io

    import pyarrow
    import pyarrow.parquet

    directory.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in drift.rows for name in row))
    columns = {name: [row.get(name) for row in drift.rows] for name in names}
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    atomic_write(directory / STATES, buffer.getvalue())
    atomic_write(directory / RESULT, to_json(drift.result, indent=2) + "\n")


def read(run: str | Path) -> dict[str, Any] | None:
    """What `measure` wrote into a run, None where there is nothing."""
    file = Path(run) / "diagnostics" / RESULT
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None
    except ValueError as error:
        raise RunError(f"{file}: can't be read: {error}; delete it and measure again.") from None
