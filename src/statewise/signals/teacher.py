"""A teacher's view of the states: next-token distributions, or the log-probability of the token that was taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from statewise.component import Signal
from statewise.errors import DataError, RecipeError, nearest
from statewise.sources.ranks import divided
from statewise.teachers import TeacherModel

if TYPE_CHECKING:
    from torch import Tensor

    from statewise.models.topk import TopK
    from statewise.types import Batch, Rollout, World

LOGPROBS, ADVANTAGES, CHOICE = "teacher_logprobs", "teacher_advantages", "teacher_choice"
IDS, VALUES = "teacher_topk_ids", "teacher_topk_logprobs"  # rows of numbers a token


class Teacher(Signal, kind="teacher"):
    """Writes of what the recipe reads:

    teacher_logits      dense, made a chunk of tokens at a time; the losses that read it name their temperature
    teacher_logprobs    log p_T(y | s) at `temperature`, nats
    teacher_advantages  teacher_logprobs - log pi(y | s) of the policy at the start of the step, detached; on the policy's
                        own states it is minus the sampled reverse KL at the token

    by, routes: the teacher of an example is routes[value of its field `by`], and `teacher`, where given, has the rest.
    cache: a folder (from the working directory) that keeps what teachers said of a text, for every later step and run.
    With it, or with a teacher at an endpoint, a teacher gives its top_k most probable tokens and one bucket.
    """

    writes: ClassVar[tuple[str, ...]] = ("teacher_logits", LOGPROBS, ADVANTAGES)

    teacher: TeacherModel | None = None
    temperature: float = Field(1.0, gt=0)
    by: str | None = None
    routes: dict[str, TeacherModel] = {}
    cache: str | None = None

    @model_validator(mode="after")
    def _some_teacher(self) -> Teacher:
        if (self.by is None) != (not self.routes):
            raise RecipeError("signal: 'teacher' takes `by` (a field of the data) and `routes` together, or neither.")
        if self.teacher is None and not self.routes:
            raise RecipeError(
                "signal: 'teacher' names no teacher; set teacher = a directory, a hub id, 'step0' or "
                "{ path = 'ema', decay = 0.99 }, or `by` and `routes`."
            )
        return self

    @property
    def compact(self) -> bool:
        """Whether teachers are asked once a step for their most probable tokens, not for logits a chunk at a time."""
        return self.cache is not None or any(model.endpoint is not None for model in self.models())

    def models(self) -> tuple[TeacherModel, ...]:
        return tuple(dict.fromkeys([*self.routes.values(), *([self.teacher] if self.teacher else [])]))

    def annotate(self, rollouts: list[Rollout], world: World) -> list[Rollout]:
        choices = [self._choice(r) for r in rollouts]
        if self.compact:
            rollouts = self._asked(rollouts, choices, world)
        elif len(self.models()) > 1:
            rollouts = [r.with_columns(**{CHOICE: [c] * r.num_tokens}) for r, c in zip(rollouts, choices, strict=True)]
        if not world.reads & {LOGPROBS, ADVANTAGES}:
            return rollouts
        if not self.compact:
            rollouts = self._scored(rollouts, choices, world)
        world.report({"teacher_nll": -_trained_mean(rollouts, LOGPROBS)})
        if ADVANTAGES not in world.reads:
            return rollouts
        own = policy_logprobs(rollouts, world)
        gaps = [
            [t - p for t, p in zip(r.columns[LOGPROBS], b, strict=True)] for r, b in zip(rollouts, own, strict=True)
        ]
        rollouts = [r.with_columns(**{ADVANTAGES: gap}) for r, gap in zip(rollouts, gaps, strict=True)]
        world.report({"sampled_reverse_kl": -_trained_mean(rollouts, ADVANTAGES)})
        return rollouts

    def _scored(self, rollouts: list[Rollout], choices: list[int], world: World) -> list[Rollout]:
        """With teacher_logprobs of the teachers in this process."""

        def score(own: list[Rollout], places: list[int]) -> list[list[float]]:
            return self._score(own, [choices[i] for i in places], world)

        scores = divided(rollouts, score, world)
        return [r.with_columns(**{LOGPROBS: s}) for r, s in zip(rollouts, scores, strict=True)]

    def _asked(self, rollouts: list[Rollout], choices: list[int], world: World) -> list[Rollout]:
        """With teacher_logprobs, and the most probable tokens where a loss reads distributions."""
        from statewise.models.topk import padded

        dense = "teacher_logits" in world.reads
        folder = None if self.cache is None else Path(self.cache)

        def ask(own: list[Rollout], places: list[int]) -> list[tuple[TopK, bool]]:
            out: dict[int, tuple[TopK, bool]] = {}
            for index in sorted({choices[i] for i in places}):
                chosen = [n for n, i in enumerate(places) if choices[i] == index]
                model = world.open_model(self.models()[index])
                found, hits = model.topk([own[n].tokens() for n in chosen], model.top_k if dense else 0, folder)
                out |= dict(zip(chosen, zip(found, hits, strict=True), strict=True))
            return [out[n] for n in range(len(own))]

        answers = divided(rollouts, ask, world)
        if folder is not None:
            hits = sum(hit for _, hit in answers)
            world.report({"teacher_cache_hits": hits, "teacher_cache_misses": len(answers) - hits})
        parts = padded([part for part, _ in answers])
        rollouts = [r.with_columns(**{LOGPROBS: p.logprobs.tolist()}) for r, p in zip(rollouts, parts, strict=True)]
        if not dense:
            return rollouts
        return [r.with_columns(**{IDS: p.ids, VALUES: p.values}) for r, p in zip(rollouts, parts, strict=True)]

    def attach(self, batch: Batch, world: World) -> Batch:
        if "teacher_logits" not in world.reads:
            return batch
        if self.compact:
            return self._with_topk(batch, world)
        models = [world.open_model(m) for m in self.models()]
        if len(models) == 1:
            return batch.with_dense(teacher_logits=models[0].dense(batch))
        return batch.with_dense(teacher_logits=Routed(tuple(m.dense(batch) for m in models), batch.column(CHOICE)))

    def _with_topk(self, batch: Batch, world: World) -> Batch:
        from statewise.models.topk import TopKGrid

        size = min(world.open_model(model).num_tokens for model in self.models())
        grid = TopKGrid(batch.column(IDS), batch.column(VALUES), size, batch.temperature)
        rest = {name: value for name, value in batch.columns.items() if name not in (IDS, VALUES)}
        return replace(batch, columns=rest).with_dense(teacher_logits=grid)

    def _choice(self, rollout: Rollout) -> int:
        """Index of the rollout's teacher in `models()`."""
        if self.by is None:
            return 0
        value = rollout.example.metadata.get(self.by)
        model = self.routes.get(str(value), self.teacher)
        if model is None:
            raise DataError(
                f"sample '{rollout.example.id}': its field '{self.by}' is {value!r}, for which signal.routes names no "
                f"teacher (it has {', '.join(self.routes)}){nearest(str(value), self.routes)}; add it, or set "
                "signal.teacher for the rest."
            )
        return self.models().index(model)

    def _score(self, rollouts: list[Rollout], choices: list[int], world: World) -> list[list[float]]:
        out: list[list[float]] = [[] for _ in rollouts]
        for index in sorted(Counter(choices)):
            places = [i for i, choice in enumerate(choices) if choice == index]
            scorer = world.open_model(self.models()[index]).scorer
            scores = scorer.score([rollouts[i].tokens() for i in places], temperature=self.temperature)
            for place, score in zip(places, scores, strict=True):
                out[place] = score["logprobs"]
        return out


def _trained_mean(rollouts: list[Rollout], name: str) -> float:
    """Mean of a column over the tokens that may be trained."""
    trained = [[s.train for s in r.segments for _ in s.tokens] for r in rollouts]
    values = [
        v for r, row in zip(rollouts, trained, strict=True) for v, t in zip(r.columns[name], row, strict=True) if t
    ]
    return fmean(values) if values else 0.0


def policy_logprobs(rollouts: list[Rollout], world: World) -> list[Sequence[float]]:
    """log pi(y | s) of the policy at the start of the step, one a token: as the signal 'behavior' measured it, or as it
    was sampled in this step, else measured."""
    known = [_known(r, world.step) for r in rollouts]
    others = [r.tokens() for r, values in zip(rollouts, known, strict=True) if values is None]
    assert world.scorer is not None
    scored = iter(world.scorer.score(others) if others else ())
    return [next(scored)["logprobs"] if values is None else values for values in known]


def _known(rollout: Rollout, step: int) -> Sequence[float] | None:
    if "behavior_logprobs" in rollout.columns:
        return rollout.columns["behavior_logprobs"]
    trained = [s for s in rollout.segments if s.train]
    if all(s.author == "policy" and s.policy_version == step and s.logprobs is not None for s in trained):
        return [v for s in rollout.segments for v in (s.logprobs or [0.0] * len(s.tokens))]
    return None


@dataclass(frozen=True)
class Routed:
    """Dense logits of several models, one chosen at every place. `choice_BT`: index into `models`."""

    models: tuple[Any, ...]
    choice_BT: Tensor

    def take(self, at: tuple[Tensor, ...]) -> RoutedRows:
        choice = self.choice_BT[at]
        places = tuple((choice == i).nonzero(as_tuple=True)[0] for i in range(len(self.models)))
        parts = tuple(m.take((at[0][p], at[1][p])) for m, p in zip(self.models, places, strict=True))
        return RoutedRows(parts, places)


@dataclass(frozen=True)
class RoutedRows:
    """Rows whose logits come from several models, on the ids that all have. `places`: the rows of each, rising."""

    parts: tuple[Any, ...]
    places: tuple[Tensor, ...]

    def logits(self, rows: slice, dtype: Any = None) -> Tensor:
        import torch

        own = [_inside(places, rows) for places in self.places]
        size = min(part.num_tokens for part in self.parts)
        logits = torch.cat([p.logits(s, dtype)[:, :size] for p, s in zip(self.parts, own, strict=True)])
        order = torch.cat([places[s] for places, s in zip(self.places, own, strict=True)])
        return logits[order.argsort()]


def _inside(places: Tensor, rows: slice) -> slice:
    """Which of the rising `places` lie in the slice."""
    return slice(int((places < rows.start).sum()), int((places < rows.stop).sum()))
