"""The signal `reward`: what it writes on a step's rollouts, whatever their order and authors."""

from dataclasses import replace
from typing import Any

import pytest

from statewise.component import parse
from statewise.signals.reward import Reward
from statewise.types import Example, Rollout, Segment, World


class Letters:
    """A tokenizer whose ids are code points."""

    chat_template = None

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(map(chr, ids))


WORLD = World(Letters(), 0)


def reward(**settings: Any) -> Reward:
    return parse("signal", {"kind": "reward", "verifier": "answer", **settings}, "signal[0]")  # type: ignore[return-value]


def written(text: str, answer: str, group: int, author: str = "policy") -> Rollout:
    """`text` after a prompt of two tokens; a text "a|b" has two authors: the policy, then `author`."""
    parts = [Segment(tuple(map(ord, t)), author, True) for t in text.split("|")]  # type: ignore[arg-type]
    if len(parts) == 2:
        parts[0] = replace(parts[0], author="policy", train=False)
    return Rollout((Segment((48, 48), "prompt"), *parts), Example(text, answer=answer), group=group)


GROUPS = [("7", "7", 3), ("5", "5", 1), ("8", "7", 3), ("5", "5", 1), ("9", "7", 3), ("7", "7", 3)]


def annotated(rollouts: list[Rollout], **settings: Any) -> tuple[list[Rollout], dict[str, float]]:
    reported: dict[str, float] = {}
    out = reward(**settings).annotate(rollouts, replace(WORLD, report=reported.update))
    return out, reported


def test_every_completion_meets_its_own_answer():
    rollouts = [written(*g) for g in GROUPS]
    out, reported = annotated(rollouts, advantage="mean")
    assert [r.reward for r in out] == [1, 1, 0, 1, 0, 1]
    assert [r.columns["advantages"] for r in out] == [[v] * 3 for v in (0.5, 0, -0.5, 0, -0.5, 0.5)]
    assert reported["reward"] == pytest.approx(4 / 6) and reported["zero_variance_share"] == 0.5
    backwards, _ = annotated(rollouts[::-1], advantage="mean")
    assert [r.columns for r in backwards[::-1]] == [r.columns for r in out]


def test_groups_of_equal_rewards():
    rollouts = [written(*g) for g in GROUPS]
    kept, _ = annotated(rollouts, zero_variance="keep")
    dropped, reported = annotated(rollouts, zero_variance="drop")
    assert len(kept) == 6 and [r.group for r in dropped] == [3, 3, 3, 3]
    assert [r.columns["advantages"] for r in dropped] == [r.columns["advantages"] for r in kept if r.group == 3]
    assert reported["zero_variance_share"] == 0.5
    assert annotated([r for r in rollouts if r.group == 1], zero_variance="drop")[0] == []
    assert annotated([], zero_variance="drop") == ([], {})


def test_masked_completions_count_in_the_baseline():
    rollouts = [written(*g) for g in GROUPS[:3:2]]
    segments = (rollouts[1].segments[0], replace(rollouts[1].segments[1], train=False))
    out, _ = annotated([rollouts[0], replace(rollouts[1], segments=segments)], advantage="mean")
    assert [r.columns["advantages"][0] for r in out] == [0.5, -0.5] and out[1].num_action_tokens == 0


def test_who_wrote_it():
    """All that follows the prompt is judged, whoever wrote it; what a data set holds is not."""
    joined = written("is 1|7", "17", 0, author="teacher")
    other = written("is 1|8", "17", 0, author="teacher")
    data = written("17", "17", 1, author="dataset")
    out, reported = annotated([joined, data, other], advantage="mean")
    by_text = {r.example.id: r for r in out}
    assert (by_text["is 1|7"].reward, by_text["is 1|8"].reward, by_text["17"].reward) == (1.0, 0.0, None)
    assert by_text["17"].columns["advantages"] == [0.0] * 4 and reported["reward"] == 0.5


def test_no_baseline():
    out, _ = annotated([written(*g) for g in GROUPS], advantage="none")
    assert [r.columns["advantages"][0] for r in out] == [1, 1, 0, 1, 0, 1]
