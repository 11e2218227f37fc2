"""The cut of a prefix, and what a continuation's rollout holds; `teacher` too. Engines are fakes that write known tokens."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from statewise.component import parse
from statewise.errors import RecipeError
from statewise.sources.continuation import ContinuationSource
from statewise.types import Completion, Rollout, Sampling, World

EOS = 9
SENTENCE = (3, 4, 7, 3, 7, EOS)  # 7 is a full stop


@dataclass
class Writer:
    """Writes the same tokens after every prompt and remembers what it was asked."""

    tokens: tuple[int, ...]
    asked: list[tuple[list[tuple[int, ...]], Sampling]] = field(default_factory=list)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, rows: Any = None) -> list[Completion]:
        self.asked.append(([tuple(p) for p in prompts], sampling))
        tokens = self.tokens[: sampling.max_tokens]
        reason = "stop" if tokens[-1] in sampling.stop_ids else "length"
        return [Completion(tokens, tuple(-0.1 * (i + 1) for i in range(len(tokens))), reason) for _ in prompts]  # type: ignore[arg-type]


class Tokenizer:
    """Six letters, a full stop, an end."""

    eos_token_id, bos_token_id, chat_template, bos_token, eos_token = EOS, None, None, None, "$"

    def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
        return {"input_ids": [1, 2]}

    def decode(self, ids: Sequence[int], **kwargs: Any) -> str:
        return "".join("." if i == 7 else "x" for i in ids)


def world_with(policy: Writer, teacher: Writer, **changes: Any) -> World:
    opened = SimpleNamespace(
        sampler=teacher,
        stop_ids=(EOS,),
        generate=lambda prompts, sampling, rows, folder: teacher.generate(prompts, sampling, rows=rows),
    )
    scorer = SimpleNamespace(
        score=lambda texts, needs: [{"entropy": [0.0, 0.0, *([0.1, 0.3, 0.2, 0.3, 0.0, 0.0])]} for _ in texts]
    )
    reports: dict[str, float] = {}
    return World(
        tokenizer=Tokenizer(),
        seed=0,
        sampler=policy,
        scorer=scorer,  # type: ignore[arg-type]
        open_model=lambda settings: opened,
        report=reports.update,
        **changes,
    )


def source_of(tmp_path: Any, kind: str = "continuation", **settings: Any) -> Any:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"id": "{i}", "prompt": "p{i}"}}\n' for i in range(4)))
    return parse("source", {"kind": kind, "data": str(data), "teacher": "t", **settings}, "source")


def prefixes(rollouts: list[Rollout]) -> list[int]:
    return [len(r.segments[1].tokens) for r in rollouts]


def test_a_rollout_is_prompt_prefix_and_trained_teacher_tokens(tmp_path: Any):
    policy, teacher = Writer(SENTENCE), Writer((5, 6, EOS))
    source = source_of(tmp_path, cut="fraction", fraction=0.5)
    rollouts = source.sample(3, 4, world_with(policy, teacher))
    for rollout in rollouts:
        prompt, prefix, answer = rollout.segments
        assert (prompt.author, prompt.tokens, prompt.train) == ("prompt", (1, 2), False)
        assert (prefix.author, prefix.tokens, prefix.train) == ("policy", SENTENCE[:3], False)
        assert prefix.policy_version == 3 and prefix.logprobs == pytest.approx((-0.1, -0.2, -0.3))
        assert (answer.author, answer.tokens, answer.train) == ("teacher", (5, 6, EOS), True)
        assert rollout.stop_reason == "stop" and rollout.num_action_tokens == 3
    assert teacher.asked[0][0] == [(1, 2, *SENTENCE[:3])] * 4
    assert len({r.example.id for r in rollouts}) == 4 and [r.group for r in rollouts] == [0, 1, 2, 3]


@pytest.mark.parametrize("tokens", [1, 2, None])
def test_the_teacher_writes_k_tokens_or_to_its_end(tokens: int | None, tmp_path: Any):
    source = source_of(tmp_path, tokens=tokens, max_tokens=40)
    rollouts = source.sample(0, 4, world_with(Writer(SENTENCE), Writer((5, 6, 5, 6, EOS))))
    assert {len(r.segments[2].tokens) for r in rollouts} == {tokens or 5}
    assert {r.stop_reason for r in rollouts} == {"stop" if tokens is None else "length"}


def test_uniform_visits_every_state_before_a_token_of_the_policy(tmp_path: Any):
    source = source_of(tmp_path)
    world = world_with(Writer(SENTENCE), Writer((5,)))
    counts = Counter(n for step in range(150) for n in prefixes(source.sample(step, 4, world)))
    assert set(counts) == set(range(len(SENTENCE)))
    assert max(abs(n - 100) for n in counts.values()) < 45  # 4.9 standard deviations of a uniform draw
    assert prefixes(source.sample(7, 4, world)) == prefixes(source.sample(7, 4, world))


def test_the_other_rules(tmp_path: Any):
    world = world_with(Writer(SENTENCE), Writer((5,)))
    by_sentence = {
        n for step in range(20) for n in prefixes(source_of(tmp_path, cut="sentence").sample(step, 4, world))
    }
    assert by_sentence == {3, 5}  # behind the full stops
    assert prefixes(source_of(tmp_path, cut="entropy").sample(0, 4, world)) == [1] * 4  # the first of two largest
    for fraction, expected in ((0.0, 0), (0.5, 3), (0.99, 5)):
        assert set(prefixes(source_of(tmp_path, cut="fraction", fraction=fraction).sample(0, 4, world))) == {expected}
    without = world_with(Writer((3, 4, 3)), Writer((5,)))
    assert prefixes(source_of(tmp_path, cut="sentence").sample(0, 4, without)) == [0] * 4


def test_settings_of_the_cut_go_together(tmp_path: Any):
    for settings in ({"cut": "fraction"}, {"cut": "uniform", "fraction": 0.5}):
        with pytest.raises(RecipeError, match="fraction"):
            source_of(tmp_path, **settings)
    assert isinstance(source_of(tmp_path), ContinuationSource)


def test_temperatures_are_those_of_who_writes(tmp_path: Any):
    policy, teacher = Writer(SENTENCE), Writer((5,))
    source_of(tmp_path, temperature=0.7, teacher_temperature=0.0, tokens=3).sample(0, 4, world_with(policy, teacher))
    assert (policy.asked[0][1].temperature, policy.asked[0][1].max_tokens) == (0.7, 256)
    assert (teacher.asked[0][1].temperature, teacher.asked[0][1].max_tokens) == (0.0, 3)


def test_teacher_states(tmp_path: Any):
    source = source_of(tmp_path, "teacher", group_size=2, max_tokens=3, truncated="mask")
    world = world_with(Writer(SENTENCE), Writer((5, 6, 5, EOS)))
    rollouts = source.sample(0, 4, world)
    assert [r.group for r in rollouts] == [0, 0, 1, 1]
    assert all(r.segments[1].author == "teacher" and not r.segments[1].train for r in rollouts)
    whole = source_of(tmp_path, "teacher", max_tokens=9, truncated="mask").sample(0, 4, world)
    assert all(r.segments[1].train and r.segments[1].logprobs is not None for r in whole)
    with pytest.raises(RecipeError, match="multiple of group_size"):
        source.sample(0, 3, world)
