"""The one loop: no branch on a method. Every recipe, whatever its source, signal and objective, runs through `train`."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statewise.errors import EndpointError, Interrupted, RunError
from statewise.recipe import Recipe
from statewise.run import RunDir
from statewise.training.alarms import Alarms, why_nothing
from statewise.training.budget import Spent, is_stuck, num_steps, progress
from statewise.training.distributed import agreed, joined, open_accelerator, total
from statewise.training.optim import build_optimizer, schedule
from statewise.training.progress import open_progress
from statewise.training.ready import check_files
from statewise.training.step import Training, take_step
from statewise.training.trackers import open_trackers
from statewise.types import World

if TYPE_CHECKING:
    from statewise.models.load import LoadedPolicy


@dataclass
class Session:
    """An opened run: what a step needs, and where its results go. On ranks other than 0 nothing is written."""

    recipe: Recipe
    run: RunDir
    policy: LoadedPolicy
    training: Training
    display: Any
    trackers: Any
    alarms: Alarms = field(default_factory=Alarms)

    @property
    def is_main(self) -> bool:
        return bool(self.training.accelerator.is_main_process)

    def log(self, row: dict[str, Any]) -> None:
        if self.is_main:
            self.run.log(row)
            self.trackers.log(row, row["step"])
            for warning in self.alarms.see(row):
                self.warn(warning)

    def warn(self, text: str) -> None:
        """Say it, and keep it in run.json: once, where a resumed run makes steps again."""
        self.display.say(f"warning: {text}")
        known = self.run.info.get("warnings", [])
        if text not in known:
            self.run.update(warnings=[*known, text])

    def progress(self) -> float:
        training = self.training
        return progress(training.spent, self.recipe.budget, self.recipe.batch, training.num_examples)


def train(
    recipe: Recipe, run_dir: str | Path, *, resume: bool = False, quiet: bool = False, track: Sequence[str] = ()
) -> RunDir:
    """Train `recipe` into the directory `run_dir` and return it as a RunDir.

    resume: go on from the last valid checkpoint; the result equals that of an uninterrupted run, byte for byte on a CPU.
    track: accelerate trackers beside metrics.jsonl: "tensorboard", "wandb", "trackio".

    Raises Interrupted after SIGINT or SIGTERM (a checkpoint is written first), NonFiniteLoss, and the errors of bad input.
    """
    check_files(recipe)
    accelerator = open_accelerator()
    with ExitStack() as stack:
        run = _open_run(recipe, Path(run_dir), resume, accelerator, stack)
        stop = stack.enter_context(_stop_requests())
        try:
            display = stack.enter_context(open_progress(recipe.name, quiet or not accelerator.is_main_process))
            trackers = open_trackers(track if accelerator.is_main_process else (), run.path, recipe.to_plain())
            stack.callback(trackers.close)
            session = _open_session(recipe, run, accelerator, display, trackers, resume)
            _run_steps(session, stop)
        except BaseException as error:
            if accelerator.is_main_process:
                with suppress(OSError):  # on a full disk too, what ended the run is told, not that it can't be noted
                    run.update(status=_status(error), error=f"{type(error).__name__}: {error}")
            raise
        if accelerator.is_main_process:
            run.update(status="completed", error=None, spent=asdict(session.training.spent))
        accelerator.wait_for_everyone()
    return run


def _run_steps(session: Session, stop: list[int]) -> None:
    from statewise.training.milestones import after_step, at_end, at_start, on_lost_endpoint

    training = session.training
    at_start(session)
    if training.spent.step and session.progress() >= 1.0:
        session.display.say("nothing is left of the budget; a larger one goes on, such as budget.max_steps=N")
    while session.progress() < 1.0:
        try:
            row = take_step(training)
        except EndpointError as error:
            on_lost_endpoint(session)
            raise EndpointError(
                f"{error}\nStopped before step {training.spent.step + 1} with a checkpoint; "
                f"go on with: statewise train --resume {session.run.path}"
            ) from None
        session.log(row)
        session.display.update(session.progress(), row)
        stopped = bool(total([float(bool(stop))], training.accelerator)[0])
        after_step(session, stopping=stopped)
        if stopped:
            raise Interrupted(
                f"stopped at step {training.spent.step} with a checkpoint; "
                f"go on with: statewise train --resume {session.run.path}"
            )
    if session.is_main and training.spent.step and not training.spent.tokens:
        rows = [row for row in session.run.metrics() if "tokens" in row]
        session.warn(f"no token was trained: {why_nothing(rows)}")
    if is_stuck(training.spent, session.recipe.budget):
        session.warn(
            f"ended at step {training.spent.step}: the last {training.spent.idle} steps trained no token, so that "
            f"budget.max_tokens can't be reached ({training.spent.tokens:,} were trained). Most likely the policy collapsed: "
            "see reward, zero_variance_share and truncated_share in metrics.jsonl; try a lower optim.lr."
        )
    at_end(session)


def _status(error: BaseException) -> str:
    return "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"


@contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """A list that receives the number of the first SIGINT or SIGTERM; a second one ends the process at once."""
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: the host program owns the signals
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _open_run(recipe: Recipe, path: Path, resume: bool, accelerator: Any, stack: ExitStack) -> RunDir:
    """The run directory, created and locked by rank 0 before anybody else opens it."""
    with agreed(accelerator):
        if accelerator.is_main_process:
            run = _resumed(recipe, path) if resume else RunDir.create(path, recipe)
            stack.enter_context(run.lock())
            run.update(status="running", error=None, world_size=accelerator.num_processes)
    return run if accelerator.is_main_process else RunDir.open(path)


def _resumed(recipe: Recipe, path: Path) -> RunDir:
    run = RunDir.open(path)
    if run.recipe_hash != recipe.hash:
        raise RunError(
            f"{path}: was made by recipe {run.recipe_hash}, and the recipe given is {recipe.hash}; a run can only go on with "
            "the same recipe. Use another --out for a changed one."
        )
    return run


def _open_session(recipe: Recipe, run: RunDir, accelerator: Any, display: Any, trackers: Any, resume: bool) -> Session:
    from statewise.sources.plain import untemplated
    from statewise.training import saving
    from statewise.training.hooks import open_hooks
    from statewise.training.opened import Models
    from statewise.training.usage import CountedEngine, Usage
    from statewise.training.world import LearnerScorer, open_learner, open_policy, open_reference, open_sampler

    display.say(f"loading {recipe.model.path}")
    found = saving.find(run, accelerator, display.say) if resume else None
    policy = open_policy(recipe, found)
    learner = open_learner(recipe, policy)
    wrapped, optimizer = accelerator.prepare(learner, build_optimizer(learner, recipe.optim))
    state, usage = saving.component_state(found), Usage()
    scorer = LearnerScorer(
        wrapped, policy.pad_id, recipe.eval.batch_tokens, accelerator.device, recipe.source.policy_temperature
    )
    hooks = open_hooks(recipe, policy, wrapped, accelerator, state, resumed=found is not None)
    world = World(
        tokenizer=policy.tokenizer,
        seed=recipe.seed,
        policy=policy.model,
        sampler=open_sampler(recipe, policy, wrapped, usage, accelerator, display.say),
        scorer=CountedEngine(scorer, usage, policy.model),
        reference=open_reference(recipe, policy, learner, wrapped, accelerator.device, usage),
        open_model=Models(recipe, policy, wrapped, hooks, accelerator.device, state, usage, display.say),
        reads=recipe.reads(),
        state=state,
        gather=partial(joined, accelerator=accelerator),
        rank=accelerator.process_index,
        num_ranks=accelerator.num_processes,
        device=str(accelerator.device),
        base_dir=recipe.base_dir,
        record=run.record if accelerator.is_main_process else _nowhere,
    )
    for part in (recipe.source, *recipe.signal):
        part.before_training(recipe.source, world)
    with agreed(accelerator):
        num_examples = recipe.source.num_examples(world)
    multiplier = schedule(recipe.optim, num_steps(recipe.budget, recipe.batch, num_examples, redraws=recipe.draws > 1))
    training = Training(
        recipe, accelerator, wrapped, optimizer, world, multiplier, Spent(), num_examples, policy.pad_id, usage, hooks
    )
    session = Session(recipe, run, policy, training, display, trackers)
    if session.is_main and not found and (doubt := untemplated(recipe.source, world)):
        session.warn(doubt)
    _take_up(session, found, resume)
    return session


def _take_up(session: Session, found: Path | None, resume: bool) -> None:
    """Bring the run to where it goes on, then open what looks at its weights: other models, diagnostics."""
    from statewise.training import saving

    training, recipe = session.training, session.recipe
    if resume:
        saving.restore(session, found)
    elif recipe.optim.state == "keep":
        saving.keep_optimizer(session)
    for model in recipe.models():
        training.world.open_model(model)
    world = replace(training.world, step=training.spent.step)
    training.hooks += [hook for part in recipe.diagnostics if (hook := part.watch(world)) is not None]


def _nowhere(row: dict[str, Any]) -> None:
    """Rank 0 keeps the records."""
