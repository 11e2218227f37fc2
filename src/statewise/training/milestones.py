"""What happens at named steps: evaluation, checkpoints, keeping the best."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from statewise.errors import RecipeError
from statewise.files import atomic_write, to_json
from statewise.training import saving
from statewise.training.distributed import is_sharded

if TYPE_CHECKING:
    from statewise.component import Component, Diagnostic
    from statewise.training.loop import Session


def at_start(session: Session) -> None:
    """Evaluate step 0, or what was due at the step that a resumed run goes on from; unless that was done before."""
    settings = session.recipe.eval
    if settings.tasks and is_sharded(session.training.learner):
        raise RecipeError(
            "eval.tasks: evaluation inside a run is not possible while parameters are sharded (FSDP); set eval.tasks = [] "
            "and run `statewise eval RUN` on the checkpoint."
        )
    if settings.at_start if session.training.spent.step == 0 else _is_due(session):
        evaluate(session)


def after_step(session: Session, *, stopping: bool) -> None:
    """Save and evaluate where the recipe says so; the last step is left to `at_end`.

    A run that is stopping only saves: its evaluation is the first thing that it does when it goes on.
    """
    step, settings, evaluates = session.training.spent.step, session.recipe.checkpoint, _is_due(session)
    wanted = session.progress() < 1.0 and bool(settings.every) and step % settings.every == 0
    if stopping or wanted or (evaluates and settings.keep_best):
        saving.save(session, _best(session))
    if evaluates and not stopping:
        evaluate(session)


def _is_due(session: Session) -> bool:
    """Whether this step, which is not the last, ends with an evaluation."""
    step, every = session.training.spent.step, session.recipe.eval.every
    return session.progress() < 1.0 and bool(every) and step % every == 0


def on_lost_endpoint(session: Session) -> None:
    """Save what the last step left: endpoints are asked before the first update of a step."""
    saving.save(session, _best(session))


def at_end(session: Session) -> None:
    """Save and evaluate the final weights."""
    settings, step = session.recipe.eval, session.training.spent.step
    saving.save(session, _best(session))
    if settings.at_end and not (step == 0 and settings.at_start):
        evaluate(session)
    if session.is_main:
        for part in session.recipe.diagnostics:
            _diagnose(session, part)
    session.training.accelerator.wait_for_everyone()


def _diagnose(session: Session, part: Diagnostic) -> None:
    """`diagnostics/<kind>.json`, and a page of its figures; the run is trained, so a fault in it is told and no more."""
    from statewise.report.page import Figure, Section, write_page

    stem = session.run.path / "diagnostics" / part.kind
    try:
        rows = part.compute(session.run)
        atomic_write(stem.with_suffix(".json"), to_json(rows, indent=1) + "\n")
        figures = [Figure(figure) for figure in part.render(rows)]
        if figures:
            write_page(stem.with_suffix(".html"), part.kind, part.describe(), [Section(session.run.path.name, figures)])
    except Exception as error:
        session.warn(f"diagnostic '{part.kind}' failed: {type(error).__name__}: {error}")


def evaluate(session: Session) -> None:
    """Run the recipe's tasks on the current weights, on rank 0 while the others wait; once a step, however often resumed."""
    step = session.training.spent.step
    tasks = [] if is_sharded(session.training.learner) else session.recipe.eval.all_tasks()
    if tasks and session.is_main and step not in session.run.evals():
        session.display.say(f"evaluating at step {step}")
        try:
            _measure(session, tasks)
        except Exception:
            if step in session.run.checkpoints():
                session.display.say(
                    f"the evaluation at step {step} failed; the weights are in {session.run.checkpoints()[step]}. Mend it and "
                    f"go on with: statewise train --resume {session.run.path}"
                )
            raise
        saving.prune(session, _best(session))
    session.training.accelerator.wait_for_everyone()


def _measure(session: Session, tasks: Sequence[Component]) -> None:
    """A row of metrics.jsonl with the scores of all tasks; the records go to the run's `evals`."""
    from statewise import evals

    recipe, step, started = session.recipe, session.training.spent.step, time.perf_counter()
    results = evals.run(
        session.policy,
        tasks,
        out=session.run.eval_dir(step),
        seed=recipe.seed,
        batch_tokens=recipe.eval.batch_tokens,
        base_dir=recipe.base_dir,
        cache=_base_scores(session) if step == 0 else None,
    )
    row: dict[str, Any] = {"step": step, "eval_seconds": time.perf_counter() - started}
    for name, result in results.items():
        row |= {f"eval/{name}": result.mean, f"eval/{name}/low": result.low, f"eval/{name}/high": result.high}
    session.log(row)
    session.display.say(f"step {step}: " + ", ".join(f"{n} {r.mean:.3f}" for n, r in results.items()))
    session.policy.model.train()


def _base_scores(session: Session) -> Any:
    """What was measured of the untrained model before, by this run or another."""
    from statewise.evals.cache import open_cache

    settings = session.recipe.model
    return open_cache(settings, device=str(session.policy.model.device), batch_tokens=session.recipe.eval.batch_tokens)


def _best(session: Session) -> int | None:
    """The step with the best score of `checkpoint.keep_best` among the steps so far; the earliest of equals."""
    settings = session.recipe.checkpoint
    if settings.keep_best is None or not session.is_main:
        return None
    key = f"eval/{settings.keep_best}"
    scores = {row["step"]: row[key] for row in session.run.metrics() if key in row}
    sign = 1 if settings.higher_is_better else -1
    return max(scores, key=lambda step: (sign * scores[step], -step)) if scores else None
