"""Tasks of lm-evaluation-harness (extra `lm-eval`) on our engines, with our records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from statewise.component import Task
from statewise.errors import DataError, MissingExtra, RecipeError, nearest
from statewise.evals.rows import Purpose

if TYPE_CHECKING:
    from collections.abc import Iterator

    from statewise.types import EvalContext

Record = dict[str, Any]
# Metrics that lm-eval makes of a sum of log-probabilities and a count of words or bytes.
ROLLING = {"word_perplexity": "nats_per_word", "byte_perplexity": "nats_per_byte", "bits_per_byte": "nats_per_byte"}


class Harness(Task, kind="lm_eval"):
    """A task or group of lm-eval by its name there.

    include: a directory of YAML tasks of yours; `data_files` in them are relative to the working directory.
    measure: the metric that is the score; none: the first that the task has. A perplexity is scored in nats a word or
    byte. filter: of lm-eval's filters, by name; none: the first.
    limit: the first so many documents of each task, as lm-eval has it.
    """

    name: str | None = None
    task: str
    include: str | None = None
    measure: str | None = None
    filter: str | None = None
    fewshot: int | None = Field(None, ge=0)
    chat: bool = False
    limit: int | None = Field(None, ge=1)
    purpose: Purpose | None = None

    @property
    def usual_purpose(self) -> Purpose:
        return "probe" if self.measure in ROLLING else "retention"

    @property
    def metric(self) -> str:
        """What the score is."""
        return ROLLING.get(self.measure or "", self.measure or "score")

    @property
    def higher_is_better(self) -> bool:
        return self.measure not in ROLLING

    def check_files(self, base_dir: Path) -> None:
        if find_spec("lm_eval") is None:
            raise MissingExtra("lm-eval", "lm-eval", f"task '{self.kind}'")
        if self.include is not None and not Path(self.include).is_dir():
            raise RecipeError(f"task '{self.kind}': include: no directory '{self.include}'.")

    def run(self, context: EvalContext) -> list[Record]:
        """A record a document: id, score, the other metrics, prompt, target and what was answered.

        Raises MissingExtra without lm-eval, RecipeError for an unknown task, metric or filter, DataError where its data
        can't be read.
        """
        with _quietly():
            samples = self._samples(context)
        several = len(samples) > 1
        records = []
        for task, found in samples.items():
            filters = list(dict.fromkeys(s["filter"] for s in found))
            chosen = self._among("filter", self.filter, filters)
            own = [self._record(task, sample) for sample in found if sample["filter"] == chosen]
            records += [{**r, "id": f"{task}/{r['id']}"} for r in own] if several else own
        return records

    def _samples(self, context: EvalContext) -> dict[str, list[dict[str, Any]]]:
        try:
            from lm_eval import simple_evaluate
            from lm_eval.tasks import TaskManager
        except ImportError:
            raise MissingExtra("lm-eval", "lm-eval", f"task '{self.kind}'") from None
        from statewise.evals.lm_eval import Engines

        manager = TaskManager(include_path=self.include, include_defaults=self.include is None)
        if self.task not in manager.all_tasks:
            where = f"in {self.include}" if self.include else "in lm-eval"
            raise RecipeError(
                f"task '{self.kind}': no task '{self.task}' {where}{nearest(self.task, manager.all_tasks)}"
            )
        try:
            found = simple_evaluate(
                Engines(context),
                tasks=[self.task],
                num_fewshot=self.fewshot,
                limit=self.limit if self.limit is not None else context.limit,
                bootstrap_iters=0,
                apply_chat_template=self.chat,
                task_manager=manager,
                random_seed=context.seed,
                numpy_random_seed=context.seed,
                torch_random_seed=context.seed,
            )
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"task '{self.kind}': lm-eval could not run '{self.task}': {error!r}") from error
        return dict(found["samples"])

    def _record(self, task: str, sample: Mapping[str, Any]) -> Record:
        measure = self._among("measure", self.measure, list(sample["metrics"]))
        value = sample[measure]
        told: Record = {"id": str(sample["doc_id"])}
        if isinstance(value, tuple | list) and len(value) == 2 and self.measure in ROLLING:
            told |= {"score": -value[0] / value[1], "weight": value[1]}
        elif isinstance(value, int | float):
            told |= {"score": float(value)}
        else:
            raise RecipeError(
                f"task '{self.kind}': the metric '{measure}' of '{task}' is no number an example (it is {value!r}); name "
                f"one with `measure`, of: {', '.join(sample['metrics'])}."
            )
        others = {name: sample[name] for name in sample["metrics"] if isinstance(sample[name], int | float)}
        arguments = sample["arguments"]
        prompts = [a[0] for a in arguments]
        answers = {"choices": [a[1] for a in arguments]} if len(prompts) > 1 and prompts[0] == prompts[1] else {}
        return {
            **others,
            **told,
            "prompt": prompts[0],
            **answers,
            "target": sample["target"],
            "response": sample["filtered_resps"],
        }

    def _among(self, what: str, wanted: str | None, known: Sequence[str]) -> str:
        if wanted is None:
            return known[0]
        if wanted not in known:
            raise RecipeError(f"task '{self.kind}': '{self.task}' has no {what} '{wanted}'{nearest(wanted, known)}")
        return wanted


@contextmanager
def _quietly() -> Iterator[None]:
    """lm-eval logs every step and draws bars of its own beside the reports of the engines."""
    import logging

    from tqdm import tqdm

    logger = logging.getLogger("lm_eval")
    level, drawn = logger.level, tqdm.__init__

    def hidden(self: Any, *args: Any, **kwargs: Any) -> None:
        drawn(self, *args, **{**kwargs, "disable": True})

    logger.setLevel(logging.ERROR)
    tqdm.__init__ = hidden
    try:
        yield
    finally:
        logger.setLevel(level)
        tqdm.__init__ = drawn
