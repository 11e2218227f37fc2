"""The sampler: its law, its independence of batching, where it stops, and what it leaves behind."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from scipy.stats import chisquare
from tests.models.test_families import build
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from statewise.errors import DataError, RecipeError, StatewiseError
from statewise.models import batching
from statewise.models.cache import RowLayer, bytes_a_token, open_cache
from statewise.models.generate import InProcessSampler, _queue, draw
from statewise.types import Sampling

VOCAB = 64


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(1)
    return [random.integers(3, VOCAB, size=n).tolist() for n in (5, 1, 9, 3, 3, 14, 2)]


def sampler(model, **kwargs):
    return InProcessSampler(model, pad_id=0, **kwargs)


def assert_same(ours, expected):
    assert [(c.tokens, c.stop_reason) for c in ours] == [(c.tokens, c.stop_reason) for c in expected]
    for a, b in zip(ours, expected, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-10)


SAMPLED = Sampling(max_tokens=12, stop_ids=(3, 4, 5), seed=7)


@pytest.mark.parametrize("sampling", [SAMPLED, replace(SAMPLED, temperature=0.0), replace(SAMPLED, top_p=0.8, top_k=9)])
@pytest.mark.parametrize("kwargs", [{"max_rows": 1}, {"max_rows": 2}, {"batch_tokens": 50}, {"batch_tokens": 1}])
def test_batching_changes_nothing(model, prompts, sampling, kwargs):
    whole = sampler(model).generate(prompts, sampling)
    parts = sampler(model, **kwargs).generate(prompts, sampling)
    assert_same(parts, whole)
    assert len({len(c.tokens) for c in whole}) > 1 or sampling.temperature == 0, "rows must end at different steps"


@pytest.mark.parametrize("family", ["Mistral", "Qwen3", "Qwen3Moe", "Gemma2", "Gemma3Text", "Phi", "Cohere"])
def test_batching_changes_nothing_in_any_family(family):
    """Sliding windows shorter than the sequences, soft-caps and eager attention among them; rows enter beside others."""
    built = build(family)
    random = np.random.default_rng(2)
    rows = [random.integers(2, 48, size=n).tolist() for n in (7, 2, 11, 4, 9, 1)]
    sampling = replace(SAMPLED, stop_ids=tuple(range(2, 10)))
    alone = sampler(built, max_rows=1).generate(rows, sampling)
    for max_rows in (2, 3, 9):
        parts = sampler(built, max_rows=max_rows).generate(rows, sampling)
        assert [c.tokens for c in parts] == [c.tokens for c in alone], max_rows
    assert len({len(c.tokens) for c in alone}) > 2


def test_a_model_with_another_kind_of_memory():
    """What Mamba keeps of a row can't be put beside another's, so rows leave a batch and none enter."""
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2)
    torch.manual_seed(0)
    mamba = transformers.MambaForCausalLM(config).double().eval()
    assert open_cache(mamba) is None
    rows = [[5, 6, 7], [8, 9, 10], [5, 6, 7], [11, 12, 13], [9, 9, 9]]
    alone = sampler(mamba, max_rows=1).generate(rows, SAMPLED)
    assert [c.tokens for c in sampler(mamba, max_rows=3).generate(rows, SAMPLED)] == [c.tokens for c in alone]


def test_equal_prompts_are_read_once_and_rows_enter_where_others_have_left(model, prompts):
    rows = [prompt for prompt in prompts if len(prompt) > 1 for _ in range(4)]
    plain = sampler(model).generate(rows, SAMPLED)
    shapes = []
    hook = model.register_forward_pre_hook(
        lambda m, args, inputs: shapes.append(inputs["input_ids"].shape), with_kwargs=True
    )
    try:
        assert_same(sampler(model, max_rows=8).generate(rows, SAMPLED), plain)
    finally:
        hook.remove()
    read, steps = ([count for count, width in shapes if (width > 1) is many] for many in (True, False))
    assert shapes[0] == (2, 14) and sum(read) <= len(rows) / 2
    lengths = [len(c.tokens) for c in plain]
    assert len(steps) < sum(max(lengths[i : i + 8]) for i in range(0, len(lengths), 8)), (
        "no batch waits for its longest"
    )
    assert max(steps) == 8


def test_without_a_bound_a_batch_has_a_gibibyte_of_keys_and_values(model, prompts, monkeypatch):
    assert bytes_a_token(model) == 2 * 2 * 2 * 8 * 8  # keys and values, layers, heads, their size, float64
    monkeypatch.setattr(batching, "CACHE_BYTES", 0)
    monkeypatch.setattr(batching, "LEAST_TOKENS", 2 * (14 + 12))
    rows = sampler(model)._entering(deque(_queue(prompts, [12] * 7, range(7), 0)), None)
    assert len(rows) == 2


def test_rows_of_caches():
    layer = RowLayer()
    first, second = torch.randn(2, 2, 3, 4, 5), torch.randn(2, 3, 3, 2, 5)
    layer.update(*first)
    other = RowLayer()
    other.update(*second)
    layer.exchange([(layer, torch.tensor([1])), (other, torch.tensor([2, 2, 0]))], width=3, room=1)
    assert torch.equal(layer.keys[0], first[0, 1, :, 1:]) and torch.equal(layer.values[1, :, 1:], second[1, 2])
    assert torch.equal(layer.keys[1], layer.keys[2]) and float(layer.keys[1:, :, 0].abs().max()) == 0
    held, buffer = layer.keys.clone(), layer.keys.data_ptr()
    for number in range(3):  # the first fits the room, the others do not
        new = torch.randn(2, 4, 3, 1, 5)
        keys, values = layer.update(*new)
        assert torch.equal(keys[:, :, -1:], new[0]) and torch.equal(values[:, :, -1:], new[1])
        assert torch.equal(keys[:, :, :3], held) and layer.get_seq_length() == 4 + number
        if number == 0:
            assert keys.data_ptr() == buffer


def test_rows_name_the_random_streams(model, prompts):
    whole = sampler(model).generate(prompts, SAMPLED)
    assert_same(sampler(model).generate(prompts[3:], SAMPLED, rows=range(3, len(prompts))), whole[3:])
    assert [c.tokens for c in sampler(model).generate(prompts[3:], SAMPLED)] != [c.tokens for c in whole[3:]]


def test_seed_and_length(model, prompts):
    first = sampler(model).generate(prompts, SAMPLED)
    assert sampler(model).generate(prompts, SAMPLED) == first
    assert sampler(model).generate(prompts, replace(SAMPLED, seed=8)) != first
    shorter = sampler(model).generate(prompts, replace(SAMPLED, max_tokens=4))
    assert [c.tokens for c in shorter] == [c.tokens[:4] for c in first]


def full_logits(model, prompt, completion):
    ids = torch.tensor([[*prompt, *completion.tokens]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return logits


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6])
def test_logprobs_are_those_of_a_full_forward_pass(model, prompts, temperature):
    single = LlamaForCausalLM(model.config).eval()
    single.load_state_dict(model.state_dict())
    sampling = replace(SAMPLED, temperature=temperature, stop_ids=())
    for prompt, completion in zip(prompts, sampler(single).generate(prompts, sampling), strict=True):
        logits = full_logits(single, prompt, completion)
        if temperature == 0:
            assert list(completion.tokens) == logits.argmax(-1).tolist()
        expected = (logits / (temperature or 1.0)).log_softmax(-1)
        picked = expected.gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
        assert completion.logprobs == pytest.approx(picked.tolist(), abs=1e-5)


def test_stop_and_length(model, prompts):
    results = sampler(model).generate(prompts * 3, SAMPLED)
    assert {c.stop_reason for c in results} == {"stop", "length"}
    for c in results:
        assert len(c.tokens) == len(c.logprobs) <= 12
        assert not set(c.tokens[:-1]) & {3, 4, 5}
        assert (c.tokens[-1] in (3, 4, 5)) == (c.stop_reason == "stop")
        assert c.stop_reason == "stop" or len(c.tokens) == 12
    nothing = sampler(model).generate(prompts[:2], replace(SAMPLED, max_tokens=0))
    assert [(c.tokens, c.stop_reason) for c in nothing] == [((), "length")] * 2
    assert sampler(model).generate([], SAMPLED) == []


def test_a_completion_ends_with_the_context(model):
    long = list(range(3, 63))
    results = sampler(model).generate([long, [9]], replace(SAMPLED, stop_ids=()))
    assert [len(c.tokens) for c in results] == [4, 12]
    assert results[0].stop_reason == "length"


def test_draws_follow_the_law():
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.5]], dtype=torch.float64)
    uniforms = torch.from_numpy(np.random.default_rng(0).random(20_000))
    rows = logits.expand(len(uniforms), -1)
    for sampling in (Sampling(1), Sampling(1, temperature=0.5), Sampling(1, top_k=3), Sampling(1, top_p=0.7)):
        picked, logprobs = draw(rows, uniforms, sampling)
        counts = np.bincount(picked.numpy(), minlength=5)
        law = np.zeros(5)
        law[picked.numpy()] = logprobs.exp().numpy()
        assert law.sum() == pytest.approx(1.0), "renormalised on the kept set"
        kept = law > 0
        assert chisquare(counts[kept], law[kept] * counts.sum()).pvalue > 1e-3
    # exp(2), exp(1), exp(0.5) hold 0.58, 0.21, 0.13 of the mass: two tokens reach 0.7.
    assert kept.tolist() == [True, False, False, True, False]


def test_restrictions_are_scored_renormalised():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    _, logprob = draw(logits, torch.tensor([0.0]), Sampling(1, top_k=2))
    assert logprob.item() == pytest.approx(np.log(1 / (1 + np.exp(-1))), abs=1e-6)
    # top_p counts mass within the top-k set: 0.665 of {0, 1, 2}, so 0.7 keeps two and 0.66 one.
    assert draw(logits, torch.tensor([0.0]), Sampling(1, top_k=3, top_p=0.66))[1].item() == 0.0
    assert draw(logits, torch.tensor([0.0]), Sampling(1, top_k=3, top_p=0.7))[1].item() < -0.1
    assert draw(logits, torch.tensor([0.5]), Sampling(1, top_p=1e-9))[0].item() == 0


def test_extreme_uniforms_never_leave_the_support():
    logits = torch.full((2, 6), -torch.inf)
    logits[:, 2:4] = 0.0
    picked, logprobs = draw(logits, torch.tensor([0.0, 1.0], dtype=torch.float64), Sampling(1))
    assert picked.tolist() == [2, 3]
    assert logprobs.tolist() == pytest.approx([np.log(0.5)] * 2)


def test_sliding_window_and_softcap(prompts):
    torch.manual_seed(3)
    config = Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=6,
        final_logit_softcapping=5.0,
        layer_types=["sliding_attention", "full_attention"],
        initializer_range=0.4,
    )
    gemma = Gemma3ForCausalLM(config).double().eval()
    whole = sampler(gemma).generate(prompts, SAMPLED)
    alone = sampler(gemma, max_rows=1).generate(prompts, SAMPLED)
    assert_same(alone, whole)


def test_peft_model_is_sampled_with_its_adapter(model, prompts):
    from copy import deepcopy

    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    adapted = get_peft_model(deepcopy(model), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    merged = deepcopy(adapted).merge_and_unload()
    engine = sampler(adapted)
    changed = engine.generate(prompts, SAMPLED)
    assert_same(changed, sampler(merged.eval()).generate(prompts, SAMPLED))
    assert [c.tokens for c in changed] != [c.tokens for c in sampler(model).generate(prompts, SAMPLED)]
    with adapted.disable_adapter():
        assert_same(engine.generate(prompts, SAMPLED), sampler(model).generate(prompts, SAMPLED))


def test_leaves_the_model_as_it_was(model, prompts):
    model.train()
    model.lm_head.eval()
    before = (model.config.to_dict(), model.generation_config.to_dict())
    try:
        sampler(model).generate(prompts, SAMPLED)
        assert model.training and model.model.training and not model.lm_head.training
        with pytest.raises(DataError):
            sampler(model).generate([[]], SAMPLED)
        assert model.training
    finally:
        model.eval()
    assert (model.config.to_dict(), model.generation_config.to_dict()) == before


def test_load_takes_a_model_or_a_loaded_policy(model, prompts):
    from statewise.models.load import LoadedPolicy

    engine = sampler(None)
    engine.load(LoadedPolicy(model, None, "here"))
    assert engine.model is model
    engine.load(model)
    assert engine.model is model


def test_progress(model, prompts):
    seen = []
    sampler(model, max_rows=2, progress=lambda *a: seen.append(a)).generate(prompts, SAMPLED)
    assert seen == [(i + 1, len(prompts)) for i in range(len(prompts))]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(-1), r"max_tokens: received -1"),
        (Sampling(1, temperature=-0.5), r"temperature: received -0\.5"),
        (Sampling(1, temperature=float("nan")), "temperature: received nan"),
        (Sampling(1, top_p=0.0), r"top_p: received 0\.0, expected in \(0, 1\]"),
        (Sampling(1, top_k=-2), "top_k: received -2"),
    ],
)
def test_refuses_what_is_no_law(model, sampling, message):
    with pytest.raises(RecipeError, match=message):
        sampler(model).generate([[1]], sampling)


def test_refuses_prompts_and_logits_it_cant_use(model):
    with pytest.raises(DataError, match="prompt 1: received 0 tokens"):
        sampler(model).generate([[1], []], SAMPLED)
    with pytest.raises(DataError, match="prompt 0: received 64 tokens, expected at least 1 and fewer than .* 64"):
        sampler(model).generate([[1] * 64], SAMPLED)
    broken = LlamaForCausalLM(model.config)
    torch.nn.init.constant_(broken.lm_head.weight, torch.nan)
    with pytest.raises(StatewiseError, match="NaN after 0 new tokens"):
        sampler(broken).generate([[1]], SAMPLED)
