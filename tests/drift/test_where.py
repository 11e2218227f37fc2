"""KL at single states against enumeration, what is read of tasks, and reachability by hand."""

import math

import pytest
import torch

from statewise.component import parse
from statewise.drift.runs import reading_context, texts_of, training_rollouts
from statewise.drift.states import DriftPrompt, fixed_prompts, visit
from statewise.drift.where import at_tasks, reachability, summary, trained, visited
from statewise.errors import DataError
from statewise.models.pair import PairScorer
from statewise.recipe import Recipe
from statewise.types import Example, Rollout, Segment


def laws(model, sequence, t):
    """Log-probabilities of the next token after tokens[:t], over the whole vocabulary."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(sequence[:t])])).logits[0, -1].double().log_softmax(-1)


@pytest.fixture
def pair(policy, moved):
    return PairScorer(policy.model, moved.model, pad_id=policy.pad_id, batch_tokens=40)


def test_kl_is_the_sum_over_the_vocabulary(policy, moved, pair):
    sequences = [[5, 9, 30, 7, 100, 8], [12, 4, 60], list(range(40, 70))]
    at = [[1, 4], [2], [3, 29]]
    for sequence, places, found in zip(sequences, at, pair.compare(sequences, at), strict=True):
        for i, t in enumerate(places):
            a, b = (laws(m, sequence, t) for m in (policy.model, moved.model))
            forward = sum(math.exp(x) * (x - y) for x, y in zip(a.tolist(), b.tolist(), strict=True))
            assert found.kl_ab[i] == pytest.approx(forward, rel=1e-3)
            assert found.kl_ba[i] == pytest.approx(float((b.exp() * (b - a)).sum()), rel=1e-3)
            assert found.kl_ab[i] != pytest.approx(found.kl_ba[i], rel=1e-3), "the directions differ"
            assert found.logprob_a[i] == pytest.approx(float(a[sequence[t]]), abs=1e-4)
            assert found.entropy_b[i] == pytest.approx(float(-(b.exp() * b).sum()), abs=1e-4)


def test_no_kl_to_oneself(policy):
    same = PairScorer(policy.model, policy.model, pad_id=policy.pad_id)
    found = same.compare([[1, 2, 3, 4]], [[1, 2, 3]])[0]
    assert found.kl_ab == found.kl_ba == [0.0, 0.0, 0.0] and found.logprob_a == found.logprob_b
    with pytest.raises(DataError, match="expected 1 <= t"):
        same.compare([[1, 2]], [[0]])


def test_visits_are_states_of_the_policy(policy):
    prompts = fixed_prompts(policy, [{"data": "tiny:math", "count": 3}, {"data": "tiny:facts", "count": 2}])
    assert [p.source for p in prompts] == ["tiny:math"] * 3 + ["tiny:facts"] * 2
    how = {"rollouts": 2, "positions": 4, "max_tokens": 12, "temperature": 1.0, "seed": 3}
    found = visit(policy, prompts, who="a", **how)
    assert [(v.prompt, v.rollout) for v in found] == [(p, r) for p in range(5) for r in range(2)]
    for v in found:
        size = len(v.tokens)
        assert all(int(j * size / 4) <= cut <= (j + 1) * size / 4 and cut < size for j, cut in enumerate(v.cuts))
    assert visit(policy, prompts, who="a", **how) == found != visit(policy, prompts, who="b", **how)


def test_rows_of_visited_states(policy, pair):
    prompts = [DriftPrompt("p", "s", (5, 6, 7))]
    found = visit(policy, prompts, who="a", rollouts=1, positions=2, max_tokens=6, temperature=1.0, seed=0)
    rows = visited(pair, prompts, found, "own_states")
    assert [r["t"] for r in rows] == list(range(len(found[0].tokens)))
    assert {(r["where"], r["source"], r["id"]) for r in rows} == {("own_states", "s", "p#0")}
    told = summary(rows, 2)["own_states"]
    assert told["kl_ab"] == pytest.approx(sum(r["kl_ab"] for r in rows) / len(rows))
    parts = told["by_position"]
    assert sum(p["states"] for p in parts) == told["states"] == told["by_source"]["s"]["states"]


def test_what_is_read_of_tasks(policy, pair, tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("Question,Best Answer,Correct Answers,Incorrect Answers\nWho?,Me,Me; I,You; They\n")
    kinds = ["tiny:facts", "tiny:math", "tiny:text"]
    tasks = [parse("task", {"kind": kind, "count": 5}, "t") for kind in kinds]
    tasks.append(parse("task", {"kind": "truthfulqa", "data": str(file), "primer": False}, "t"))
    texts = texts_of(tasks, reading_context(policy, tmp_path, 3))
    decode = policy.tokenizer.decode
    assert {name: len(found) for name, found in texts.items()} == {**dict.fromkeys(kinds, 3), "truthfulqa": 1}
    row = tasks[0].chosen(reading_context(policy, tmp_path, 3))[0][1]
    assert decode(texts["tiny:facts"][0].answer) == row["choices"][row["answer"]]
    assert texts["tiny:math"][0].answer == () and len(texts["tiny:text"][0].prompt) == 1
    assert decode(texts["truthfulqa"][0].prompt) == "Q: Who?\nA:" and decode(texts["truthfulqa"][0].answer) == " Me."
    rows = at_tasks(pair, {"tiny:facts": texts["tiny:facts"]})
    asked, answered = ([r for r in rows if r["where"] == f"retention_{w}"] for w in ("prompt", "answer"))
    assert len(answered) == sum(len(t.answer) for t in texts["tiny:facts"])
    assert len(asked) == sum(len(t.prompt) - 1 for t in texts["tiny:facts"])


def test_reachability_by_hand(policy, pair):
    """A prompt of two tokens, a prefix of the policy that is not trained, and a trained end."""
    tokens = [5, 6, 40, 41, 42, 43]
    parts = (Segment((5, 6), "prompt"), Segment((40, 41), "policy"), Segment((42, 43), "teacher", train=True))
    rows = trained(pair, [Rollout(parts, Example("x"))])
    logs = [float(laws(policy.model, tokens, t)[tokens[t]]) for t in range(1, 6)]
    assert [r["t"] for r in rows] == [2, 3] and {r["source"] for r in rows} == {"teacher"}
    prefixes = [sum(logs[1:3]), sum(logs[1:4])]
    assert [r["prefix_logprob_a"] for r in rows] == pytest.approx(prefixes, abs=1e-3)
    told = reachability(rows)
    assert told["logprob"] == pytest.approx(sum(logs[3:]) / 2, abs=1e-3) and told["tokens"] == 2
    assert told["prefix_logprob"] == pytest.approx(sum(prefixes) / 2, abs=1e-3)
    entropies = [-(p.exp() * p).sum() for p in (laws(policy.model, tokens, t) for t in (4, 5))]
    assert told["phi"] == pytest.approx(float(sum(entropies)) / 2 + told["logprob"], abs=1e-3)
    assert told["rare_share"] == sum(x < math.log(0.01) for x in logs[3:]) / 2 and reachability([]) == {}


def test_training_states_are_those_of_the_recipe(policy, model_dir):
    plain = {
        "model": {"path": str(model_dir)},
        "source": {"kind": "dataset", "data": "tiny:math", "count": 24},
        "signal": ["gold"],
        "objective": ["nll"],
        "batch": {"rollouts": 8},
        "budget": {"max_steps": 3},
    }
    found = training_rollouts(Recipe.from_plain(plain), policy, 9)
    assert len(found) == 9 and all(r.num_action_tokens for r in found)
    assert len({r.example.id for r in found}) == 9, "three steps, no example twice"
    sampled = {"kind": "policy", "data": "tiny:math", "count": 4, "max_tokens": 6, "group_size": 2}
    reward = {"signal": [{"kind": "reward", "verifier": "answer"}], "objective": ["reinforce"]}
    own = training_rollouts(Recipe.from_plain({**plain, "source": sampled, **reward}), policy, 4)
    assert {s.author for r in own for s in r.segments if s.train} == {"policy"}
