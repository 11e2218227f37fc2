"""Mixtures: exact counts, schedules, groups, capabilities; replay: ages, whole groups, a state that survives the disk."""

from collections import Counter
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statewise.component import Source, parse
from statewise.errors import RecipeError
from statewise.recipe import Recipe
from statewise.sources.mixture import largest_remainder
from statewise.sources.replay import Replay
from statewise.training.checkpoint import load_tensors, save_tensors
from statewise.types import Example, Rollout, Segment, World


class Counting(Source, kind="test_counting"):
    """Groups of `group_size`; every token says step and number."""

    needs_policy: ClassVar[bool] = True
    authors: ClassVar[tuple[str, ...]] = ("policy",)  # type: ignore[assignment]
    writes: ClassVar[tuple[str, ...]] = ("behavior_logprobs",)
    group_size: int = 1
    salt: int = 0

    def sample(self, step: int, num_rollouts: int, world: World) -> list[Rollout]:
        world.report({"drawn": num_rollouts})
        example = Example("e", ({"role": "user", "content": "x"},), None, 3, {"nested": {"list": [1, None]}})
        return [
            Rollout(
                (Segment((1,), "prompt"), Segment((step, i), "policy", True, (-0.1 * i, -1 / 3), step)),
                example,
                group=i // self.group_size,
                stop_reason="stop",
            )
            for i in range(num_rollouts)
        ]


class Gold(Counting, kind="test_gold"):
    needs_policy: ClassVar[bool] = False
    authors: ClassVar[tuple[str, ...]] = ("dataset",)  # type: ignore[assignment]
    writes: ClassVar[tuple[str, ...]] = ("gold",)

    def sample(self, step: int, num_rollouts: int, world: World) -> list[Rollout]:
        segments = (Segment((1,), "prompt"), Segment((2, 3), "dataset", True))
        return [Rollout(segments, Example("g"), group=i) for i in range(num_rollouts)]


def mixture(*parts: dict[str, Any]) -> Any:
    return parse("source", {"kind": "mixture", "parts": list(parts)}, "source")


def world(**changes: Any) -> World:
    return World(tokenizer=None, seed=0, **changes)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=6).filter(lambda w: sum(w) > 0.01), st.integers(0, 200))
def test_counts_are_exact_and_within_one_of_their_share(weights: list[float], total: int):
    counts = largest_remainder(weights, total)
    assert sum(counts) == total
    for weight, count in zip(weights, counts, strict=True):
        assert abs(count - total * weight / sum(weights)) < 1 + 1e-9
        assert weight > 0 or count == 0


def test_largest_remainder_by_hand():
    assert largest_remainder([1, 1, 1], 10) == [4, 3, 3]
    assert largest_remainder([0.5, 0.3, 0.2], 7) == [4, 2, 1]  # 3.5, 2.1, 1.4
    assert largest_remainder([1, 0], 5) == [5, 0]


def test_a_schedule_is_linear_in_progress():
    source = mixture(
        {"source": "test_gold", "weight": [1.0, 0.0]}, {"source": {"kind": "test_counting"}, "weight": [0.0, 1.0]}
    )
    for progress, expected in ((0.0, [8, 0]), (0.25, [6, 2]), (1.0, [0, 8])):
        rollouts = source.sample(0, 8, world(progress=progress))
        authors = Counter(r.segments[1].author for r in rollouts)
        assert [authors["dataset"], authors["policy"]] == expected


def test_groups_are_renumbered_and_kept_whole():
    source = mixture({"source": {"kind": "test_counting", "group_size": 4}}, {"source": "test_gold"})
    rollouts = source.sample(0, 8, world())
    assert [r.group for r in rollouts] == [0, 0, 0, 0, 1, 2, 3, 4]
    with pytest.raises(RecipeError, match="multiple of 4"):
        source.sample(0, 6, world())


def test_what_only_some_write_is_nan_on_the_others():
    reports: dict[str, float] = {}
    rollouts = mixture({"source": "test_counting"}, {"source": "test_gold"}).sample(0, 4, world(report=reports.update))
    for rollout in rollouts:
        own = rollout.segments[1]
        assert own.logprobs is not None
        assert isnan(own.logprobs[0]) == (own.author == "dataset")
    assert [set(r.columns["part"]) for r in rollouts] == [{0.0}, {0.0}, {1.0}, {1.0}]
    assert reports == {"test_counting/drawn": 2, "test_counting/num_rollouts": 2, "test_gold/num_rollouts": 2}


def plain(objective: list[Any], *parts: Any) -> dict[str, Any]:
    return {
        "source": {"kind": "mixture", "parts": list(parts)},
        "signal": [{"kind": "teacher", "teacher": "t"}],
        "objective": objective,
        "budget": {"max_steps": 1},
    }


def test_a_capability_is_one_of_all_parts_or_of_the_author_that_a_term_names():
    both = ({"source": "test_counting"}, {"source": "test_gold"})
    with pytest.raises(RecipeError, match="'nll' reads 'gold', which nothing"):
        Recipe.from_plain(plain(["nll"], *both))
    on = {"kind": "author", "author": "dataset"}
    Recipe.from_plain(plain([{"loss": "nll", "on": on}], *both))
    clip = {"loss": {"kind": "clip", "advantages": "teacher_advantages"}}
    with pytest.raises(RecipeError, match="'clip' reads 'behavior_logprobs', which nothing"):
        Recipe.from_plain(plain([{**clip, "on": on}], *both))
    Recipe.from_plain(plain([{**clip, "on": {"kind": "author", "author": "policy"}}], *both))
    Recipe.from_plain(plain(["nll"], both[1], {"source": "test_gold", "name": "again"}))


def test_a_recipe_of_a_mixture_goes_through_toml():
    import tomllib

    parts = [
        {"source": {"kind": "replay", "source": {"kind": "test_counting", "group_size": 2}}, "weight": [0.2, 1.0]},
        {"source": "test_gold", "name": "gold"},
    ]
    recipe = Recipe.from_plain(plain(["kl_student_teacher"], *parts))
    again = Recipe.from_plain(tomllib.loads(recipe.to_toml()))
    assert again == recipe and again.hash == recipe.hash
    assert recipe.source.needs_policy and recipe.source.part_names == ("replay", "gold")


def test_void_mixtures_are_refused():
    with pytest.raises(RecipeError, match="occurs twice"):
        mixture({"source": "test_gold"}, {"source": "test_gold"})
    with pytest.raises(RecipeError, match="all weights are 0"):
        mixture({"source": "test_gold", "weight": [1.0, 0.0]})
    with pytest.raises(RecipeError, match="unknown source 'test_golf'; did you mean 'test_gold'"):
        mixture({"source": "test_golf"})


def replayed(step: int, rollouts: list[Rollout]) -> list[int]:
    """Ages of the rollouts that are older than the step."""
    return [step - r.segments[1].tokens[0] for r in rollouts if r.segments[1].tokens[0] != step]


def run(source: Replay, steps: int, here: World, start: int = 0) -> list[list[Rollout]]:
    return [source.sample(step, 8, here) for step in range(start, steps)]


def test_replay_takes_whole_groups_of_allowed_age():
    source = Replay(source={"kind": "test_counting", "group_size": 2}, fraction=0.6, max_age=3)
    drawn = run(source, 12, world())
    assert [len(rollouts) for rollouts in drawn] == [8] * 12
    assert [len(replayed(step, rollouts)) for step, rollouts in enumerate(drawn)] == [0] + [4] * 11
    ages = {age for step, rollouts in enumerate(drawn) for age in replayed(step, rollouts)}
    assert ages == {1, 2, 3}
    for rollouts in drawn:
        assert Counter(r.group for r in rollouts) == {0: 2, 1: 2, 2: 2, 3: 2}
        for rollout in rollouts:
            (mate,) = [r for r in rollouts if r.group == rollout.group and r is not rollout]
            assert mate.segments[1].tokens[0] == rollout.segments[1].tokens[0]


def test_a_replayed_rollout_is_the_one_that_was_drawn():
    source = Replay(source="test_counting", fraction=0.5, max_age=1)
    first, second = run(source, 2, world())
    old = [r for r in second if r.segments[1].policy_version == 0]
    assert len(old) == 4
    for rollout in old:
        (original,) = [r for r in first if r.segments == rollout.segments]
        assert replace(rollout, group=0) == replace(original, group=0)


def test_the_buffer_survives_the_disk(tmp_path: Path):
    source = Replay(source={"kind": "test_counting", "group_size": 2}, max_age=3)
    whole, begun = world(), world()
    expected = run(source, 9, whole)
    run(source, 5, begun)
    save_tensors(tmp_path / "state.safetensors", begun.state)
    resumed = world(state=load_tensors(tmp_path / "state.safetensors"))
    assert run(source, 9, resumed, start=5) == expected[5:]
    for name, here in (("a", whole), ("b", resumed)):
        save_tensors(tmp_path / name, here.state)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_buffer_holds_no_more_than_it_may_replay():
    source = Replay(source="test_counting", fraction=0.5, max_age=2)
    here = world()
    run(source, 9, here)
    (buffer,) = here.state.values()
    assert {group["step"] for group in buffer} == {6, 7, 8}
