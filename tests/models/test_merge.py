"""Merged adapters: the sum of W0 and the update, rounded once, as an ordinary model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.training.conftest import model_dir  # noqa: F401 - a fixture

from statewise.errors import RunError
from statewise.models.load import load_policy
from statewise.models.merge import merge
from statewise.settings import Adapter, ModelSettings

SCALE = 16 / 4


@pytest.fixture
def adapter(model_dir: Path, tmp_path: Path) -> Path:  # noqa: F811
    """A LoRA of rank 4 whose B is not 0."""
    policy = load_policy(ModelSettings(path=str(model_dir), adapter=Adapter(rank=4, alpha=16)), trainable=True)
    torch.manual_seed(0)
    for name, value in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.02)
    policy.model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    policy.tokenizer.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_merged_weights_are_the_sum(adapter: Path, model_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    assert merge(adapter, tmp_path / "merged", "bfloat16") == "bfloat16"
    before, after = (load_file(path / "model.safetensors") for path in (model_dir, tmp_path / "merged"))
    update = load_file(adapter / "adapter_model.safetensors")
    changed = 0
    for name, value in before.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        expected = value.float()
        if f"{stem}.lora_A.weight" in update:
            expected = expected + SCALE * (update[f"{stem}.lora_B.weight"] @ update[f"{stem}.lora_A.weight"])
            changed += not torch.equal(expected, value.float())
        assert after[name].dtype == torch.bfloat16
        assert torch.allclose(after[name].float(), expected.bfloat16().float(), atol=1e-6, rtol=2**-8), name
    assert changed > 0 and json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_merged_model_computes_the_same(adapter: Path, tmp_path: Path) -> None:
    merge(adapter, tmp_path / "merged", "float32")
    ids = torch.tensor([[5, 9, 2, 7]])
    with torch.no_grad():
        one, other = (load_policy(str(p)).model(input_ids=ids).logits for p in (adapter, tmp_path / "merged"))
    assert torch.allclose(one, other, atol=1e-5)
    assert not list(tmp_path.glob(".merged*")), "nothing is left beside it"


def test_the_type_is_the_base_s(adapter: Path, model_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    stored = next(iter(load_file(model_dir / "model.safetensors").values())).dtype
    assert merge(adapter, tmp_path / "merged") == str(stored).removeprefix("torch.")


def test_what_cannot_be_merged(adapter: Path, model_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(RunError, match="holds no adapter"):
        merge(model_dir, tmp_path / "merged")
    with pytest.raises(RunError, match="is no directory"):
        merge(tmp_path / "nope", tmp_path / "merged")
    (tmp_path / "merged").mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "merged" / "w.safetensors")
    with pytest.raises(RunError, match="exists; choose another"):
        merge(adapter, tmp_path / "merged")
