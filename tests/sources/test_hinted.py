"""The source `hinted`: own answers first, hinted ones else, and what is discarded."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from statewise.component import parse
from statewise.errors import DataError, RecipeError
from statewise.models.load import load_policy
from statewise.recipe import Recipe
from statewise.sources.hinted import HintedSource
from statewise.sources.realigning import KINDS, yields
from statewise.types import World

TINY = {"kind": "hinted", "data": "tiny:math", "count": 24, "hint": "echo", "verifier": "answer", "max_tokens": 64}
ANYTHING = {"kind": "regex", "pattern": "####"}


@pytest.fixture(scope="module")
def policy():
    return load_policy("tiny")


@pytest.fixture
def world(policy):
    return World(policy.tokenizer, seed=3, policy=policy.model)


def source(**settings) -> HintedSource:
    return parse("source", {**TINY, **settings}, "source")


def outcomes(given: HintedSource, world, **settings):
    prompts = given.prompts(world)
    return given.realigner(world, **settings).realign(prompts, range(len(prompts)), seed=5)


def test_own_right_answers_come_first(world):
    found = outcomes(source(), world)
    counts = yields(found)
    assert list(counts) == list(KINDS)
    assert sum(counts.values()) == 24
    assert 4 < counts["own"] < 20
    for outcome in found:
        if outcome.kind == "own":
            assert (outcome.hinted, outcome.context) == (None, None)
            assert set(outcome.own.weights) == {1.0}
        else:
            assert outcome.hinted.weights[0] == 0.0
            at = outcome.hinted.delimiter_at
            assert at is None or set(outcome.hinted.weights[at:]) <= {1.0}


def test_batches_of_any_size_give_the_same_outcomes(world):
    whole, single = outcomes(source(), world), outcomes(source(), world, max_rows=1)
    for a, b in zip(whole, single, strict=True):
        assert (a.kind, a.reward) == (b.kind, b.reward)
        assert (a.kept and a.kept.tokens) == (b.kept and b.kept.tokens)


def test_without_own_answers_all_are_hinted(world):
    given = source(own_tries=0, verifier=ANYTHING, count=8)
    counts = yields(outcomes(given, world))
    assert counts["own"] == 0
    assert counts["realigned"] >= 6


def test_more_tries_solve_more(world):
    once, often = outcomes(source(), world), outcomes(source(tries=3, own_tries=3, temperature=1.0), world)
    assert yields(often)["failed"] < yields(once)["failed"]


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"delimiter": "no such text"}, "no_delimiter"),
        ({"max_tokens": 4}, "too_long"),
        ({"repeat_window": 1, "repeat_count": 2}, "repeated"),
        ({"verifier": {"kind": "regex", "pattern": "no such text"}}, "failed"),
    ],
)
def test_why_texts_are_discarded(world, settings, kind):
    found = outcomes(source(**{"own_tries": 0, "verifier": ANYTHING, "count": 6, **settings}), world)
    assert Counter(o.kind for o in found).most_common(1)[0][0] == kind
    assert all(o.kept is None for o in found if o.kind == kind)


def test_a_context_that_does_not_fit_is_too_long(world, tmp_path):
    (tmp_path / "long.toml").write_text("[[messages]]\nrole = 'user'\ncontent = '''" + "long " * 600 + "{answer}'''")
    found = outcomes(source(hint="long.toml", count=12), replace(world, base_dir=tmp_path))
    assert {o.kind for o in found} == {"own", "too_long"}


def test_the_analysis_is_context_and_not_text(world, tmp_path):
    (tmp_path / "study.toml").write_text(
        "[[messages]]\nrole = 'user'\ncontent = '{question} {answer}'\n[analysis]\nopening = '7 + 1 ='\nheading = '####'"
    )
    given = source(hint="study.toml", own_tries=0, verifier=ANYTHING, count=6)
    found = outcomes(given, replace(world, base_dir=tmp_path))
    studied = [o for o in found if o.context is not None]
    assert studied, "the embedded model writes #### on a line of its own"
    for outcome in studied:
        context = world.tokenizer.decode(outcome.context)
        assert "assistant\n7 + 1 =" in context
        assert context.endswith("####")
        assert outcome.hinted is not None
    assert all(o.kind == "no_analysis" for o in found if o.context is None)


def test_rollouts(world):
    told = {}
    rollouts = source().sample(0, 12, replace(world, report=told.update))
    assert len(rollouts) == told["num_kept"] > 0
    assert sum(told[f"{kind}_share"] for kind in KINDS) == pytest.approx(1)
    for rollout in rollouts:
        prompt, text = rollout.segments
        assert (prompt.author, text.author, text.train) == ("prompt", "policy", True)
        assert text.tokens[-1] == world.tokenizer.eos_token_id
        assert rollout.reward == 1.0
        start = len(prompt.tokens)
        assert set(rollout.columns["hint_weights"][:start]) == {0.0}
        ids = torch.tensor([rollout.tokens()])
        with torch.no_grad():
            logprobs = world.policy(input_ids=ids).logits[0, start - 1 : -1].log_softmax(-1)
        phi = logprobs.gather(-1, ids[0, start:, None])[:, 0] - (logprobs.exp() * logprobs).sum(-1)
        assert rollout.columns["behavior_phi"][start:] == pytest.approx(phi.tolist(), abs=1e-4)


def test_the_delimiter_comes_from_the_data(world):
    assert source().shown(world)[2] == "####"
    assert source(delimiter="none").shown(world)[2] is None
    assert source(delimiter="= ").shown(world)[2] == "= "


def test_what_is_shown(world):
    example = source().examples(world)[0]
    whole = source().answer_of(example)
    assert "####" in whole
    assert source(remove=[r"\n#### .*"]).answer_of(example) == whole.split("\n")[0]


def test_rows_without_an_answer_are_bad_rows(world, tmp_path):
    rows = ['{"prompt": "q", "completion": "3\\n#### 3"}', '{"prompt": "no answer"}']
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    given = source(data="data.jsonl", count=None, hint="base")
    there = replace(world, base_dir=tmp_path)
    with pytest.raises(DataError, match=r"data.jsonl:2: has no answer to show.*it has prompt"):
        given.prompts(there)
    skipping = source(data="data.jsonl", count=None, hint="base", on_bad_row="skip")
    assert len(skipping.prompts(there)) == 1
    assert yields(outcomes(skipping, there))["own"] in (0, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"low": 0.9}, "low < high"),
        ({"remove": ["("]}, "is no regular expression"),
        ({"beta": -1}, "source.beta"),
        ({"verifier": "answr"}, "did you mean 'answer'"),
    ],
)
def test_settings_that_are_none(settings, message):
    with pytest.raises(RecipeError, match=message):
        source(**settings)


@pytest.mark.parametrize("writer", ["policy", "step0"])
def test_training_on_it(tmp_path, writer):
    from statewise.training.loop import train

    recipe = Recipe.from_plain(
        {
            "source": {**TINY, "writer": writer, "own_tries": 0, "verifier": ANYTHING},
            "signal": ["gold"],
            "objective": [{"loss": "nll", "weight": "cll"}],
            "batch": {"rollouts": 4},
            "optim": {"lr": 0.02},
            "budget": {"max_steps": 2},
        }
    )
    run = train(recipe, tmp_path / "run", quiet=True)
    first, second = (row for row in run.metrics() if "num_kept" in row)
    assert first["num_kept"] > 0
    # After a step as long as this one the policy writes something else, its past does not.
    assert (second["kept_phi"] < first["kept_phi"] - 1 or second["num_kept"] == 0) == (writer == "policy")
