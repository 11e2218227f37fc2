"""A random Qwen3 model of 40,000 parameters with a tokenizer and chat template, and a recipe that trains it in seconds."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from statewise.recipe import Recipe
from statewise.run import RunDir


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from statewise.tiny import mixture
    from statewise.tiny.tokenizer import train_tokenizer

    random = Random(0)
    tokenizer = train_tokenizer((mixture.draw_document(random, mixture.MIXTURE) for _ in range(300)), 320, 256)
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def plain(model_dir: Path) -> dict[str, Any]:
    """A recipe as nested dicts: six steps of IDFT on 24 problems."""
    return {
        "model": {"path": str(model_dir)},
        "source": {"kind": "dataset", "data": "tiny:math", "count": 24},
        "signal": ["gold"],
        "objective": [{"loss": "nll", "weight": "cll"}],
        "batch": {"rollouts": 8, "micro_rows": 4},
        "optim": {"lr": 1e-2, "schedule": "cosine", "warmup": 0.2},
        "checkpoint": {"every": 2},
        "budget": {"max_steps": 6},
    }


@pytest.fixture
def recipe(plain: dict[str, Any]) -> Recipe:
    return Recipe.from_plain(plain, name="small")


def weights_of(run: Path, step: int, file: str = "model.safetensors") -> bytes:
    return (run / "checkpoints" / f"step_{step:06d}" / file).read_bytes()


def losses_of(run: RunDir) -> list[float]:
    return [row["loss"] for row in run.metrics() if "loss" in row]
