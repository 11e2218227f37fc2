"""A random model with its tokenizer, a second one near it, and quick runs of three methods."""

from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from statewise.models.load import LoadedPolicy
from statewise.run import RunDir


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from statewise.tiny import mixture
    from statewise.tiny.tokenizer import train_tokenizer

    random = Random(0)
    tokenizer = train_tokenizer((mixture.draw_document(random, mixture.MIXTURE) for _ in range(300)), 320, 256)
    config = Qwen3Config(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, initializer_range=0.2, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def policy(model_dir: Path) -> LoadedPolicy:
    from statewise.drift.runs import load

    return load(str(model_dir))


@pytest.fixture(scope="session")
def model(policy: LoadedPolicy) -> Any:
    return policy.model


@pytest.fixture(scope="session")
def tokenizer(policy: LoadedPolicy) -> Any:
    return policy.tokenizer


@pytest.fixture(scope="session")
def moved(policy: LoadedPolicy) -> LoadedPolicy:
    """The policy after a step in a random direction."""
    other = deepcopy(policy.model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    return LoadedPolicy(other, policy.tokenizer, "moved")


METHODS = {
    "mild": {"optim": {"lr": 1e-4}},
    "stress": {"optim": {"lr": 1e-2}},
    "opd": {
        "source": {"kind": "continuation", "data": "tiny:math", "count": 8, "max_tokens": 8},
        "optim": {"lr": 1e-3},
    },
}


@pytest.fixture(scope="session")
def runs(model_dir: Path, moved: LoadedPolicy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDir]:
    """Four runs: three methods, one of them with two seeds."""
    from statewise import train
    from statewise.recipe import Recipe

    root = tmp_path_factory.mktemp("runs")
    moved.model.save_pretrained(root / "teacher")
    moved.tokenizer.save_pretrained(root / "teacher")
    found = {}
    for name, seed in [("mild", 0), ("mild", 1), ("stress", 0), ("opd", 0)]:
        plain: dict[str, Any] = {
            "model": {"path": str(model_dir)},
            "source": {"kind": "dataset", "data": "tiny:math", "count": 16},
            "signal": ["gold"],
            "objective": ["nll"],
            "batch": {"rollouts": 8},
            "budget": {"max_steps": 2},
            "eval": {"tasks": [{"kind": "tiny:facts", "count": 20}]},
            "seed": seed,
            **deepcopy(METHODS[name]),
        }
        if name == "opd":
            plain["source"]["teacher"] = str(root / "teacher")
        recipe = Recipe.from_plain(plain, name=name)
        found[f"{name}{seed}"] = train(recipe, root / f"{name}{seed}", quiet=True)
    return found
