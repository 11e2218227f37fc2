"""What a source samples, as rows of a data set: rejection sampling and sequence distillation in two stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from statewise.errors import DataError, RecipeError
from statewise.models.generate import InProcessSampler
from statewise.models.load import load_policy
from statewise.models.score import InProcessScorer
from statewise.recipe import Recipe
from statewise.signals.reward import Reward, is_sampled
from statewise.sources.judging import completion_text, judged
from statewise.sources.plain import untemplated
from statewise.training.opened import Models, directory_of
from statewise.training.world import replace_model
from statewise.types import Rollout, World

Row = dict[str, Any]
Report = Callable[[int, int, dict[str, float]], None]


def sampled_rows(
    recipe: Recipe,
    count: int | None = None,
    report: Report = lambda done, count, measures: None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Row]:
    """Rows `id`, `prompt`, `completion`, `input_ids`, `completion_mask`, `answer`, `reward` of what the recipe's source gives
    with the recipe's model, as in the first steps of a training that changes no weight. `reward` is what the source's or the
    signal's verifier says; None where there is none, or where the data lack what it needs, which `say` is told once.

    count: samples that the source draws, in whole groups, and the most rows that come of them (default: a pass through its
    prompts, in steps of batch.rollouts); a source that rejects some gives fewer.
    report(done, count, measures) is called after each step: of what is drawn. Raises RecipeError where the source samples
    nothing.
    """
    source, size = recipe.source, recipe.batch.rollouts
    if not source.needs_policy and not source.models():
        raise RecipeError(f"source '{source.kind}' samples nothing; expected one such as 'rejection' or 'teacher'.")
    world = open_world(recipe)
    source.before_training(source, world)
    if doubt := untemplated(source, world):
        say(f"warning: {doubt}")
    wanted = count or source.num_examples(world) or size
    steps = -(-wanted // size)
    group = getattr(source, "group_size", 1)
    size = -(-wanted // (steps * group)) * group if count else size

    def rows() -> Iterator[Row]:
        left = count or steps * size
        judge = _Judge(recipe, say)
        for step in range(steps):
            measures: dict[str, float] = {}
            now = replace(world, step=step, report=measures.update)
            rollouts = judge(source.sample(step, size, now), now)[:left]
            left -= len(rollouts)
            yield from (_row(r, f"{step}-{index}", world.tokenizer) for index, r in enumerate(rollouts))
            report((step + 1) * size, steps * size, measures)

    return rows()


class _Judge:
    """Gives rollouts the rewards of the recipe's signal, where it has one; ends with the first row that can't be judged."""

    def __init__(self, recipe: Recipe, say: Callable[[str], None]):
        self.verifiers = [signal.verifier for signal in recipe.signal if isinstance(signal, Reward)]
        self.say = say

    def __call__(self, rollouts: list[Rollout], world: World) -> list[Rollout]:
        written = [r for r in rollouts if is_sampled(r)]
        if not self.verifiers or not written:
            return rollouts
        try:
            scores = judged(self.verifiers[0], written, world).scores
        except DataError as error:
            self.verifiers = []
            self.say(f"warning: no reward from here on: {error}")
            return rollouts
        world.report({"reward": fmean(scores)})
        rewards = iter(scores)
        return [replace(r, reward=next(rewards)) if is_sampled(r) else r for r in rollouts]


def open_world(recipe: Recipe) -> World:
    """Policy, engines and other models of a recipe, for what changes no weight."""
    settings = recipe.model
    if (Path(settings.path) / "run.json").is_file():
        settings = replace_model(settings, directory_of(settings.path))
    policy = load_policy(settings, device="cuda" if torch.cuda.is_available() else None)
    device = next(policy.model.parameters()).device
    return World(
        tokenizer=policy.tokenizer,
        seed=recipe.seed,
        policy=policy.model,
        sampler=InProcessSampler(policy.model, pad_id=policy.pad_id),
        scorer=InProcessScorer(policy.model, pad_id=policy.pad_id, batch_tokens=recipe.eval.batch_tokens),
        open_model=Models(recipe, policy, policy.model, [], device, {}),
        reads=recipe.reads(),
        device=str(device),
        base_dir=recipe.base_dir,
    )


def _row(rollout: Rollout, number: str, tokenizer: Any) -> Row:
    """In the formats that the source 'dataset' reads: messages where the prompt was a conversation, else text; and the ids."""
    example, text = rollout.example, completion_text(rollout, tokenizer)
    row: Row = {"id": f"{example.id}-{number}", "prompt": example.text, "completion": text}
    if example.messages:
        answer = {"role": "assistant", "content": text}
        row |= {"prompt": [dict(m) for m in example.messages], "completion": [answer]}
    mask = [int(s.author not in ("prompt", "environment")) for s in rollout.segments for _ in s.tokens]
    ids = {"input_ids": rollout.tokens(), "completion_mask": mask}
    return {**row, "answer": example.answer, "reward": rollout.reward, **ids}
