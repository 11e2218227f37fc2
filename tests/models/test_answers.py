"""Answers scored after a shared prompt equal answers scored one by one."""

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from statewise.models.answers import AnswerScorer
from statewise.models.score import InProcessScorer

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.4,
}


def llama():
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def gemma():
    layers = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=6, layer_types=layers, final_logit_softcapping=5.0)
    return Gemma3ForCausalLM(config)


def adapted():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False))


@pytest.fixture(scope="module")
def groups():
    random = np.random.default_rng(0)

    def ids(n):
        return random.integers(1, 64, size=n).tolist()

    return [(ids(n), [ids(m) for m in sizes]) for n, sizes in ((7, (1, 3)), (1, (2,)), (13, (5, 1, 4)), (2, (1, 1)))]


@pytest.mark.parametrize("make", [llama, gemma, adapted])
@pytest.mark.parametrize("batch_tokens", [8192, 60, 1])
def test_equals_one_by_one(make, groups, batch_tokens):
    torch.manual_seed(1)
    model = make().double()
    ours = AnswerScorer(model, pad_id=5, batch_tokens=batch_tokens).score_answers(groups)
    plain = InProcessScorer(model, pad_id=0)
    for (prompt, answers), sums in zip(groups, ours, strict=True):
        scored = plain.score([[*prompt, *answer] for answer in answers])
        expected = [sum(s["logprobs"][-len(a) :]) for s, a in zip(scored, answers, strict=True)]
        assert sums == pytest.approx(expected, abs=1e-9)


def test_prompts_of_one_token_and_no_groups():
    torch.manual_seed(2)
    engine = AnswerScorer(llama().double(), pad_id=0)
    assert engine.score_answers([]) == []
    (found,) = engine.score_answers([([3], [[4, 5]])])
    assert found == pytest.approx([sum(engine.score([[3, 4, 5]])[0]["logprobs"])])


def test_a_head_that_cannot_be_split(groups):
    torch.manual_seed(3)
    model = llama().double()
    expected = AnswerScorer(model, pad_id=0).score_answers(groups)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.warns(UserWarning, match="one-pass head not used"):
        found = AnswerScorer(model, pad_id=0).score_answers(groups)
    assert [x for g in found for x in g] == pytest.approx([x for g in expected for x in g], abs=1e-9)


def test_the_mode_is_kept(groups):
    model = llama().train()
    AnswerScorer(model, pad_id=0).score_answers(groups)
    assert model.training
