"""Saved models are what from_pretrained reads, with the trained weights in their dtypes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from statewise.training import checkpoint


class Tokenizer:
    """Only what save_model asks of a tokenizer."""

    def save_pretrained(self, path: Path) -> None:
        (Path(path) / "tokenizer_config.json").write_text("{}")


def llama(tied: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def full_state(model: Any) -> dict[str, torch.Tensor]:
    """As `train.distributed.model_state` gives it: every name, tied ones twice, memory not shared."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_model(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    model = llama(tied, dtype)
    model.generation_config.use_cache = False
    checkpoint.save_model(tmp_path, model, Tokenizer(), full_state(model))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == dtype and loaded.generation_config.use_cache
    tokens = torch.arange(10)[None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    stored = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in stored) == (not tied)


@pytest.mark.parametrize("trained_only", [True, False])
def test_adapter(tmp_path: Path, trained_only: bool) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.peft_config["default"].base_model_name_or_path = "org/base"
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    state = {n: v for n, v in full_state(model).items() if n in trained or not trained_only}
    checkpoint.save_model(tmp_path, model, Tokenizer(), state)
    assert not (tmp_path / "model.safetensors").exists()
    loaded = PeftModel.from_pretrained(llama(), tmp_path)
    assert loaded.peft_config["default"].base_model_name_or_path == "org/base"
    tokens = torch.arange(10)[None]
    assert torch.equal(loaded.eval()(tokens).logits, model.eval()(tokens).logits)


def test_adapter_of_the_embedded_base_names_it(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    from statewise.tiny import model_path

    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    model.peft_config["default"].base_model_name_or_path = str(model_path())
    checkpoint.save_model(tmp_path, model, Tokenizer(), full_state(model))
    assert '"base_model_name_or_path": "tiny"' in (tmp_path / "adapter_config.json").read_text()
