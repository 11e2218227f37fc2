"""Hinted Decoding: the law's oracles, and that batching, caching and leaving rows change no token."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.models.test_families import build

from statewise.errors import DataError, RecipeError
from statewise.models import batching
from statewise.models.delimiter import Delimiter
from statewise.models.generate import InProcessSampler, stream
from statewise.models.hinted import HintedDecoder, HintedPrompt
from statewise.models.hinted_law import HintedLaw, draw_hinted, mixture, narrowed, plain_weight
from statewise.models.load import load_policy
from statewise.sources.templates import encode_prompt
from statewise.tiny import tasks
from statewise.types import Sampling

P_I, P_M = [0.7, 0.2, 0.1], [0.2, 0.5, 0.3]
LAW = HintedLaw(max_tokens=16)
ORACLES = {  # beta: lambda, mixture, law after top-p 0.95 and then T = 0.3
    0.0: (0, [0.7, 0.2, 0.1], [0.9833945995, 0.0151066327, 0.0014987678]),
    0.5: (0.3649233496, [0.5082708185, 0.3204703582, 0.1712588233], [0.8054415921, 0.1731183156, 0.0214400923]),
    1.0: (0.7298466992, [0.3138610220, 0.4367076587, 0.2494313193], [0.2236021136, 0.6724406876, 0.1039571987]),
    3.0: (1, [0.2, 0.5, 0.3], [0.0383585631, 0.8134465587, 0.1481948782]),
}


def logs(values):
    return torch.tensor([values], dtype=torch.float64).log()


def entropy(p):
    return -sum(x * math.log(x) for x in p)


@pytest.mark.parametrize("beta", ORACLES)
def test_oracles_of_the_law(beta):
    weight, mixed, final = ORACLES[beta]
    law = replace(LAW, beta=beta)
    found = plain_weight(torch.tensor([entropy(P_I)], dtype=torch.float64), 3, law)
    assert found.tolist() == pytest.approx([weight], abs=1e-9)
    mix = mixture(logs(P_I), logs(P_M), found)
    assert mix.exp()[0].tolist() == pytest.approx(mixed, abs=1e-9)
    assert narrowed(mix, law).softmax(-1)[0].tolist() == pytest.approx(final, abs=1e-9)


def test_the_oracles_see_a_swapped_stream_and_a_mixture_of_probabilities():
    weight, mixed, _ = ORACLES[0.5]
    w = torch.tensor([weight], dtype=torch.float64)
    assert mixture(logs(P_M), logs(P_I), w).exp()[0].tolist() != pytest.approx(mixed, abs=1e-3)
    linear = [(1 - weight) * a + weight * b for a, b in zip(P_I, P_M, strict=True)]
    assert linear != pytest.approx(mixed, abs=1e-3)


def test_the_mixture_is_the_minimum_of_the_two_divergences():
    weight = 0.3649
    p, q = logs(P_I)[0], logs(P_M)[0]

    def objective(log_m):
        m = log_m.exp()
        return ((1 - weight) * (m * (log_m - p)).sum() + weight * (m * (log_m - q)).sum()).item()

    best = mixture(p[None], q[None], torch.tensor([weight], dtype=torch.float64))[0]
    assert objective(best) == pytest.approx(0.1370929180, abs=1e-9)
    for shift in torch.eye(3, dtype=torch.float64) * 0.05:
        assert objective((best + shift).log_softmax(-1)) > objective(best)


def test_order_of_nucleus_and_temperature():
    m, law = logs([0.5, 0.3, 0.15, 0.05]), replace(LAW, top_p=0.9)
    first = narrowed(m, law).softmax(-1)[0].tolist()
    assert first == pytest.approx([0.8331554926, 0.1517854805, 0.0150590270, 0], abs=1e-9)
    second = narrowed(m, replace(law, order="temperature_first")).softmax(-1)[0].tolist()
    assert second == pytest.approx([0.8458938306, 0.1541061694, 0, 0], abs=1e-9)


@pytest.mark.parametrize(
    ("law", "share", "weight"),
    [
        (replace(LAW, rule="sigmoid", beta=4.0), 0.5, 0.5),
        (replace(LAW, rule="sigmoid", beta=4.0), 0.75, 1 / (1 + math.exp(-1))),
        (replace(LAW, rule="piecewise"), 0.3, 0.0),
        (replace(LAW, rule="piecewise"), 0.5, 0.5),
        (replace(LAW, rule="piecewise"), 0.9, 1.0),
        (replace(LAW, beta=0.7), 1.0, 0.7),
    ],
)
def test_rules_of_the_weight(law, share, weight):
    found = plain_weight(torch.tensor([share * math.log(512)], dtype=torch.float64), 512, law)
    assert found.tolist() == pytest.approx([weight], abs=1e-12)


def test_masked_tokens_give_no_nan():
    masked = torch.tensor([[0.0, -math.inf, 1.0]] * 3)
    fixed = torch.tensor([0.0, 1.0, math.nan])
    drawn = draw_hinted(masked, masked, fixed, torch.tensor([0.1, 0.5, 0.9]), LAW)
    assert not (drawn.tokens == 1).any()
    for values in (drawn.logprobs, drawn.weights, drawn.phi):
        assert torch.isfinite(values).all()


def test_phi_is_the_plain_streams_at_temperature_1():
    z = torch.tensor([[2.0, 0.5, -1.0]], dtype=torch.float64)  # oracle A: phi = z - E_p z
    for u, phi in ((0.1, 0.3802733080), (0.9, -1.1197266920)):
        drawn = draw_hinted(
            torch.zeros_like(z), z, torch.tensor([1.0]), torch.tensor([u]), replace(LAW, temperature=1.0)
        )
        assert drawn.phi.item() == pytest.approx(phi, abs=1e-9)
        assert drawn.weights.item() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": -1.0}, "beta: received -1.0"),
        ({"top_p": 0.0}, "top_p"),
        ({"low": 0.8}, "low: received 0.8, expected at least 0 and below high"),
        ({"repeat_count": 1}, "repeat_count"),
        ({"temperature": math.nan}, "temperature"),
    ],
)
def test_no_law(change, message):
    with pytest.raises(RecipeError, match=message):
        HintedDecoder(build("Llama"), pad_id=0).decode([HintedPrompt([1])], replace(LAW, **change))


class Letters:
    """A tokenizer of single characters; id 40 is the added token `</think>`."""

    def get_added_vocab(self):
        return {"</think>": 40}

    def decode(self, ids, skip_special_tokens=False):
        return "".join("</think>" if i == 40 else chr(33 + i) for i in ids)


def pairs(seed=2, sizes=((7, 12), (2, 9), (11, 14), (4, 5), (9, 20), (1, 3), (6, 8))):
    random = np.random.default_rng(seed)
    return [HintedPrompt(*(random.integers(2, 48, size=n).tolist() for n in size)) for size in sizes]


def uncached(model, prompt, law, *, name, delimiter=None):
    """The batch-1 loop without caches: both contexts are read anew for every token."""
    tokens, weights, behind = [], [], False
    uniforms = stream(law.seed, name, law.max_tokens)
    with torch.no_grad():
        while len(tokens) < law.max_tokens:

            def last(ids):
                return model(input_ids=torch.tensor([[*ids, *tokens]]), use_cache=False).logits[:, -1]

            plain = last(prompt.plain)
            alone = behind or prompt.imitator is None
            fixed = 1.0 if alone else 0.0 if law.first_from_imitator and not tokens else math.nan
            u = torch.tensor([uniforms[len(tokens)]], dtype=torch.float64)
            imitator = plain if alone else last(prompt.imitator)
            drawn = draw_hinted(imitator, plain, torch.tensor([fixed]), u, law)
            tokens.append(drawn.tokens.item())
            weights.append(drawn.weights.item())
            if tokens[-1] in law.stop_ids:
                break
            behind = behind or (delimiter is not None and delimiter.just_came(tokens))
    return tuple(tokens), weights


def common_mark(model):
    """A delimiter of one character that comes early in several texts of the model."""
    found = HintedDecoder(model, pad_id=0).decode(pairs(), SAMPLED)
    token, count = Counter(t for c in found for t in set(c.tokens[1:-4])).most_common(1)[0]
    assert count >= 2
    return Delimiter(chr(33 + token), Letters()), token


SAMPLED = HintedLaw(16, temperature=1.0, beta=1.5, stop_ids=(2, 3), repeat_count=0, seed=7)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3", "Gemma2", "Cohere"])
def test_any_batch_gives_the_tokens_of_the_uncached_loop(family):
    model = build(family)
    mark, _ = common_mark(model)
    prompts = [*pairs(), HintedPrompt([5, 6, 7])]
    expected = [uncached(model, p, SAMPLED, name=i, delimiter=mark) for i, p in enumerate(prompts)]
    for kwargs in ({"max_rows": 1}, {"max_rows": 5}, {}, {"batch_tokens": 90}):
        found = HintedDecoder(model, pad_id=0, **kwargs).decode(prompts, SAMPLED, delimiter=mark)
        assert [c.tokens for c in found] == [tokens for tokens, _ in expected], kwargs
        for completion, (_, weights) in zip(found, expected, strict=True):
            assert completion.weights == pytest.approx(weights, abs=1e-5)
    assert len({len(c.tokens) for c in found}) > 2, "rows must leave at different steps"
    assert any(0 < (c.delimiter_at or 0) < len(c.tokens) for c in found)


def test_equal_contexts_are_plain_sampling_whatever_beta():
    model = build("Llama")
    prompts = [p.plain for p in pairs()]
    plain = InProcessSampler(model, pad_id=0).generate(prompts, Sampling(16, stop_ids=(2, 3), seed=7))
    for beta in (0.0, 0.5, 3.0):
        law = replace(SAMPLED, beta=beta, top_p=1.0)
        found = HintedDecoder(model, pad_id=0).decode([HintedPrompt(p, p) for p in prompts], law)
        assert [c.tokens for c in found] == [c.tokens for c in plain]
        for ours, theirs in zip(found, plain, strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_beta_0_is_the_imitator_alone():
    model = build("Llama")
    law = replace(SAMPLED, beta=0.0, top_p=1.0)
    found = HintedDecoder(model, pad_id=0).decode(pairs(), law)
    prompts = [p.imitator for p in pairs()]
    alone = InProcessSampler(model, pad_id=0).generate(prompts, Sampling(16, stop_ids=(2, 3), seed=7))
    assert [c.tokens for c in found] == [c.tokens for c in alone]
    assert {w for c in found for w in c.weights} == {0.0}
    ruled = HintedDecoder(model, pad_id=0).decode(pairs(), replace(law, beta=1.5))
    assert [c.tokens for c in ruled] != [c.tokens for c in alone]


def test_the_imitators_say_in_the_first_token_alone():
    """With lambda = 1 behind the first token, the rest is what the plain stream samples from there."""
    model = build("Llama")
    law = replace(SAMPLED, rule="piecewise", low=0.0, high=1e-9, top_p=1.0)
    found = HintedDecoder(model, pad_id=0).decode(pairs(), law)
    assert {c.weights[0] for c in found} == {0.0}
    assert {w for c in found for w in c.weights[1:]} == {1.0}
    alone = HintedDecoder(model, pad_id=0).decode(pairs(), replace(law, first_from_imitator=False))
    plain = InProcessSampler(model, pad_id=0).generate(
        [p.plain for p in pairs()], Sampling(16, stop_ids=(2, 3), seed=7)
    )
    assert [c.tokens for c in alone] == [c.tokens for c in plain]


def test_behind_the_delimiter_the_hint_changes_nothing():
    model = build("Llama")
    mark, token = common_mark(model)
    prompts = pairs()
    found = HintedDecoder(model, pad_id=0).decode(prompts, SAMPLED, delimiter=mark)
    reached = [(p, c) for p, c in zip(prompts, found, strict=True) if c.delimiter_at]
    assert reached
    for prompt, completion in reached:
        at = completion.delimiter_at
        assert completion.tokens[at - 1] == token
        assert token not in completion.tokens[: at - 1]
        assert set(completion.weights[at:]) <= {1.0}
        index = prompts.index(prompt)
        rest = HintedPrompt([*prompt.plain, *completion.tokens[:at]])
        uniforms = stream(SAMPLED.seed, index, SAMPLED.max_tokens)[at:]
        assert drawn_alone(model, rest.plain, uniforms, SAMPLED) == completion.tokens[at:]


def drawn_alone(model, ids, uniforms, law):
    """What the plain stream alone draws by these uniforms."""
    tokens = []
    for u in uniforms:
        if tokens and tokens[-1] in law.stop_ids:
            break
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*ids, *tokens]]), use_cache=False).logits[:, -1]
        u = torch.tensor([u], dtype=torch.float64)
        tokens.append(draw_hinted(logits, logits, torch.tensor([1.0]), u, law).tokens.item())
    return tuple(tokens)


def test_rows_of_an_imitator_leave_the_batch(monkeypatch):
    model = build("Llama")
    mark, _ = common_mark(model)
    sizes = []
    fed = batching.Batch.feed

    def counted(batch, model):
        sizes.append((len(batch.rows), sum(row.is_imitator for row in batch.rows)))
        return fed(batch, model)

    monkeypatch.setattr(batching.Batch, "feed", counted)
    found = HintedDecoder(model, pad_id=0).decode(pairs(), SAMPLED, delimiter=mark)
    reached = sum(1 for c in found if c.delimiter_at and len(c.tokens) > c.delimiter_at + 2)
    assert reached, "some must go on without their imitator"
    fed_imitators, fed_plain = sum(n for _, n in sizes), sum(size - n for size, n in sizes)
    assert 0 < fed_imitators < fed_plain


def test_repetition_stops():
    model = build("Llama")
    law = replace(SAMPLED, max_tokens=40, temperature=0.0, stop_ids=(), repeat_window=3, repeat_count=4)
    found = HintedDecoder(model, pad_id=0).decode(pairs(sizes=((3, 5), (2, 4), (8, 9))), law)
    repeated = [c for c in found if c.stop_reason == "repeated"]
    assert repeated, "greedy text of a random model must run in circles"
    for completion in repeated:
        windows = Counter(zip(*(completion.tokens[i:] for i in range(3)), strict=False))
        assert max(windows.values()) == 4
        assert windows[completion.tokens[-3:]] == 4
    never = HintedDecoder(model, pad_id=0).decode(pairs(), replace(law, repeat_count=0))
    assert {c.stop_reason for c in never} == {"length"}


def test_the_longer_context_limits_both():
    model = build("Llama")  # 64 positions
    law = replace(SAMPLED, max_tokens=100, stop_ids=())
    [found] = HintedDecoder(model, pad_id=0).decode([HintedPrompt([5] * 3, [6] * 60)], law)
    assert (len(found.tokens), found.stop_reason) == (4, "length")
    with pytest.raises(DataError, match="hinted prompt 0: received 64 tokens"):
        HintedDecoder(model, pad_id=0).decode([HintedPrompt([5], [6] * 64)], law)


def test_text_may_end_at_the_delimiter():
    model = build("Llama")
    mark, token = common_mark(model)
    found = HintedDecoder(model, pad_id=0).decode(pairs(), SAMPLED, delimiter=mark, stop_at_delimiter=True)
    ended = [c for c in found if c.stop_reason == "delimiter"]
    assert ended
    assert all(c.tokens[-1] == token and c.delimiter_at == len(c.tokens) for c in ended)


def test_delimiters():
    text = Delimiter("BC", Letters())
    ids = [ord(c) - 33 for c in "ABACBC"]
    assert [text.just_came(ids[: n + 1]) for n in range(6)] == [False] * 5 + [True]
    token = Delimiter("</think>", Letters())
    spelt = [ord(c) - 33 for c in "</think>"]
    assert not any(token.just_came(spelt[: n + 1]) for n in range(8)), "an added token is matched by its id alone"
    assert token.just_came([3, 40])


def test_a_delimiter_across_tokens_and_behind_a_cut_character():
    tokenizer = load_policy("tiny").tokenizer
    for text in ("é####", "5\n#### 7", "a \\boxed{4}"):
        mark = Delimiter("####" if "#" in text else "\\boxed{", tokenizer)
        ids = tokenizer(text)["input_ids"]
        came = [mark.just_came(ids[: n + 1]) for n in range(len(ids))]
        assert sum(came) >= 1
        assert mark.text in tokenizer.decode(ids[: came.index(True) + 1])
        assert mark.text not in tokenizer.decode(ids[: came.index(True)])


def test_the_embedded_model_in_float32():
    """Any batch gives the tokens of batch 1, and those are the uncached loop's."""
    policy = load_policy("tiny")
    prompts = []
    for row in tasks.math_problems("train", 10, seed=3):
        hint = [*row["prompt"], *row["completion"], *row["prompt"]]
        prompts.append(
            HintedPrompt(encode_prompt(policy.tokenizer, row["prompt"]), encode_prompt(policy.tokenizer, hint))
        )
    law = HintedLaw(48, temperature=0.8, stop_ids=policy.stop_ids, seed=1)
    mark = Delimiter("####", policy.tokenizer)

    def decode(**kwargs):
        return HintedDecoder(policy.model, pad_id=policy.pad_id, **kwargs).decode(prompts, law, delimiter=mark)

    alone = decode(max_rows=1)
    for kwargs in ({"max_rows": 6}, {}):
        found = decode(**kwargs)
        assert [c.tokens for c in found] == [c.tokens for c in alone]
        for a, b in zip(found, alone, strict=True):
            assert a.phi == pytest.approx(b.phi, abs=1e-3)
            assert (a.delimiter_at, a.stop_reason) == (b.delimiter_at, b.stop_reason)
    for index in (0, 4):
        assert alone[index].tokens == uncached(policy.model, prompts[index], law, name=index, delimiter=mark)[0]
    assert sum(c.delimiter_at is not None for c in alone) >= 8
