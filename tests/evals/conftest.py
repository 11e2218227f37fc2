"""A random model with a tokenizer and chat template, engines that answer as told, and small data files."""

import json
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from statewise.models.load import LoadedPolicy
from statewise.types import Completion, EvalContext


@pytest.fixture(scope="session")
def tokenizer():
    from statewise.tiny import mixture
    from statewise.tiny.tokenizer import train_tokenizer

    random = Random(0)
    return train_tokenizer((mixture.draw_document(random, mixture.MIXTURE) for _ in range(300)), 320, 512)


@pytest.fixture(scope="session")
def model(tokenizer):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="session")
def policy(model, tokenizer):
    return LoadedPolicy(model, tokenizer, "random")


class ScriptedSampler:
    """Answers the n-th prompt with the n-th text."""

    def __init__(self, tokenizer, texts, stop_reason="stop"):
        self.tokenizer, self.texts, self.stop_reason = tokenizer, texts, stop_reason
        self.prompts, self.sampling = [], None

    def load(self, policy):
        pass

    def generate(self, prompts, sampling):
        self.prompts, self.sampling = [self.tokenizer.decode(p) for p in prompts], sampling
        ids = [self.tokenizer.encode(text, add_special_tokens=False) for text in self.texts]
        assert len(ids) == len(prompts)
        return [Completion(tuple(x), (0.0,) * len(x), self.stop_reason) for x in ids]


class LikingScorer:
    """Each character of a sequence costs one nat, but a sequence that ends in a liked text costs `cost` in all."""

    def __init__(self, tokenizer, liked, cost=0.5):
        self.tokenizer, self.liked, self.cost, self.seen = tokenizer, liked, cost, []

    def score(self, sequences, needs=("logprobs",)):
        out = []
        for sequence in sequences:
            text = self.tokenizer.decode(list(sequence))
            self.seen.append(text)
            logprobs = [-float(len(self.tokenizer.decode([t]))) for t in sequence]
            if text.endswith(tuple(self.liked)):
                logprobs = [-self.cost / len(sequence)] * len(sequence)
            out.append({"logprobs": logprobs})
        return out


@pytest.fixture
def context(model, tokenizer):
    """Makes an EvalContext with the given engines."""

    def make(sampler=None, scorer=None, **kwargs):
        return EvalContext(model, tokenizer, sampler, scorer, **kwargs)

    return make


@pytest.fixture
def engines(tokenizer):
    return SimpleNamespace(
        sampler=lambda texts, **kwargs: ScriptedSampler(tokenizer, texts, **kwargs),
        scorer=lambda *liked, **kwargs: LikingScorer(tokenizer, liked, **kwargs),
    )


@pytest.fixture
def write(tmp_path):
    """Writes rows as JSON lines, or text as it is, and gives the path as text."""

    def make(name, content):
        path = Path(tmp_path) / name
        text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return make
