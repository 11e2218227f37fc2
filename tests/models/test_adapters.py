"""LoRA layers while tokens are sampled: the same map, less work, and nothing left behind."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from statewise.models.adapters import lean_adapters, lean_forward
from statewise.models.generate import InProcessSampler
from statewise.types import Sampling

IDS = torch.arange(3, 19).reshape(2, 8)


def adapted(dtype=torch.float64, **kwargs):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)).to(dtype)
    settings = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.5, "target_modules": "all-linear"} | kwargs
    model = get_peft_model(base, LoraConfig(**settings)).eval()
    for name, value in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.3)
    return model


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def layers(model):
    return [m for m in model.modules() if hasattr(m, "lora_A")]


@pytest.mark.parametrize("kwargs", [{}, {"use_rslora": True}, {"target_modules": ["q_proj", "up_proj"]}])
def test_it_is_the_same_map(kwargs):
    model = adapted(**kwargs)
    expected = logits(model)
    with model.disable_adapter():
        assert (logits(model) - expected).abs().max() > 0.1
    with lean_adapters(model):
        assert all("forward" in vars(layer) for layer in layers(model))
        assert torch.allclose(logits(model), expected, atol=1e-4)  # peft holds the adapter in float32
    assert not any("forward" in vars(layer) for layer in layers(model))
    assert torch.equal(logits(model), expected)


def test_an_update_is_seen_next_time():
    model = adapted()
    with lean_adapters(model):
        before = logits(model)
    layers(model)[0].lora_B["default"].weight.data.mul_(2)
    with lean_adapters(model):
        assert not torch.equal(logits(model), before)


def test_small_updates_survive_in_bfloat16():
    """Merged into bf16 weights, an update of a thousandth of the weights' last place would be lost."""
    model = adapted(torch.bfloat16)
    one = layers(model)[0]
    one.lora_B["default"].weight.data.fill_(1e-6)
    base, x = one.base_layer, torch.ones(1, 32, dtype=torch.bfloat16)
    base.weight.data.fill_(1.0)
    delta = one.get_delta_weight("default")
    assert torch.equal(base.weight + delta.to(torch.bfloat16), base.weight)
    base.weight.data.zero_()
    assert torch.allclose(lean_forward(one)(x).float(), x.float() @ delta.float().T, rtol=0.02, atol=0)


def test_other_layers_keep_their_own_way():
    dora = adapted(use_dora=True)
    assert all(lean_forward(layer) is None for layer in layers(dora))
    model = adapted()
    with model.disable_adapter():
        assert all(lean_forward(layer) is None for layer in layers(model))
    model.merge_adapter()
    assert all(lean_forward(layer) is None for layer in layers(model))
    model.unmerge_adapter()
    second = copy.deepcopy(model)
    second.add_adapter("other", second.peft_config["default"])
    second.base_model.set_adapter(["default", "other"])
    assert all(lean_forward(layer) is None for layer in layers(second))


def test_sampling_leaves_no_trace_even_when_it_fails():
    model = adapted()
    sampler = InProcessSampler(model, pad_id=0)
    sampler.generate([[5, 6, 7]], Sampling(max_tokens=4))
    assert not any("forward" in vars(layer) for layer in layers(model))
    with pytest.raises(RuntimeError, match="stop"), lean_adapters(model):
        raise RuntimeError("stop")
    assert not any("forward" in vars(layer) for layer in layers(model))
