"""Model families built tiny from their configs: learner, scorer and one-pass head against the model's own full logits."""

import warnings
from typing import Any

import pytest
import torch
import transformers

from statewise.component import parse
from statewise.models.head import split_head
from statewise.models.score import InProcessScorer
from statewise.objective import Term, denominators
from statewise.testing import rollouts
from statewise.training.learner import Learner
from statewise.training.packing import micro_batches

VOCAB = 48
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
GEMMA = {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
# float64 where the family can: grouped experts have no float64 product, and eager attention's softmax is float32.
SINGLE = {"Qwen3Moe", "Gemma2"}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Gemma2": {**GEMMA, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 20.0, "attn_implementation": "eager"},
    "Gemma3Text": {**GEMMA, "final_logit_softcapping": 2.0},
    "Phi": {"num_key_value_heads": 4},
    "Phi3": {"num_key_value_heads": 4},
    "Granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "Cohere": {"logit_scale": 0.25},
}


def build(family: str) -> Any:
    settings = {**COMMON, **FAMILIES[family]}
    attention = settings.pop("attn_implementation", "sdpa")
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model = model.float() if family in SINGLE else model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:  # larger than the usual initial values, so that logits are far from uniform
                parameter.normal_(0, 0.3)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
    return model.eval()


def own_loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy of the model's own logits over action tokens, summed."""
    mask = (batch.sequence_BT >= 0).long()
    logits = model(input_ids=batch.tokens_BT, attention_mask=mask, use_cache=False).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, batch.tokens_BT[:, 1:, None])[..., 0]
    return -(logprobs * batch.action_mask_BT[:, 1:]).sum()


def gradient(model: Any) -> torch.Tensor:
    grads = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}
    model.zero_grad()
    return torch.cat([g.flatten() for g in grads.values()])


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_gradient_and_scores_equal_the_models_own(family: str):
    model, tolerance = build(family), 1e-5 if family in SINGLE else 1e-6
    term = Term(loss=parse("loss", "nll", "loss"))
    batches = micro_batches(rollouts(), pad_id=0)
    shares = denominators([term], batches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the fallback would warn, and must not be taken
        learner = Learner(model, [term])
        assert learner.head is not None
        loss = sum(learner(b, shares)["loss"] for b in batches)
    loss.backward()
    got = gradient(model)
    expected = sum(own_loss(model, b) for b in batches) / shares[0]
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=tolerance)
    wanted = gradient(model)
    assert float((got - wanted).abs().max()) <= tolerance * max(1.0, float(wanted.abs().max()))

    scores = InProcessScorer(model, pad_id=0).score([r.tokens() for r in rollouts()], ("logprobs", "entropy"))
    for rollout, score in zip(rollouts(), scores, strict=True):
        ids = torch.tensor([rollout.tokens()])
        with torch.no_grad():
            log_p = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        own = log_p.gather(-1, ids[0, 1:, None])[:, 0]
        assert torch.allclose(torch.tensor(score["logprobs"][1:], dtype=torch.float64), own.double(), atol=tolerance)
        entropy = -(log_p.exp() * log_p).sum(-1)
        assert torch.allclose(torch.tensor(score["entropy"][1:], dtype=torch.float64), entropy.double(), atol=tolerance)


def test_a_misread_scale_is_noticed():
    """The head is compared with the model's logits when it is split, so a config that misleads can't pass silently."""
    model = build("Cohere")
    model.config.update({"logit_scale": 7.0})  # the module keeps the right value, which it read when it was made
    with pytest.warns(UserWarning, match="own logits differ"):
        assert split_head(model) is None


class OddHead(torch.nn.Module):
    """An output layer that is no linear map."""

    def __init__(self, inner: torch.nn.Linear):
        super().__init__()
        self.inner = inner
        self.weight = inner.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden).sin() * 4


def test_an_unknown_head_falls_back_and_says_so():
    model = build("Llama")
    model.lm_head = OddHead(model.lm_head)
    term = Term(loss=parse("loss", "nll", "loss"), weight=parse("weight", "cll", "weight"))
    with pytest.warns(UserWarning, match="one-pass head not used: the output layer is a OddHead"):
        learner = Learner(model, [term])
    batch = micro_batches(rollouts(), pad_id=0)[0]
    shares = denominators([term], [batch])
    output = learner(batch, shares)
    output["loss"].backward()
    got = gradient(model)
    logits = model(input_ids=batch.tokens_BT, attention_mask=(batch.sequence_BT >= 0).long(), use_cache=False).logits
    log_p = logits[:, :-1].log_softmax(-1)
    logprobs = log_p.gather(-1, batch.tokens_BT[:, 1:, None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    weight = parse("weight", "cll", "weight")
    from statewise.weights import cll

    assert weight is not None
    w = cll(logprobs, entropy).detach()
    expected = -(w * logprobs * batch.action_mask_BT[:, 1:]).sum() / shares[0]
    expected.backward()
    assert float(output["loss"].detach()) == pytest.approx(float(expected.detach()), abs=1e-7)
    assert torch.allclose(got, gradient(model), atol=1e-7)


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_lora_on_the_head_and_everywhere(family: str):
    from peft import LoraConfig, get_peft_model

    model = build(family)
    targets = ["q_proj", "down_proj", "lm_head"] if family == "Llama" else ["q_proj", "up_proj"]
    torch.manual_seed(1)
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")).double()
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    term = Term(loss=parse("loss", "nll", "loss"))
    batch = micro_batches(rollouts(), pad_id=0)[0]
    shares = denominators([term], [batch])
    learner = Learner(peft, [term])
    assert learner.head is not None
    learner(batch, shares)["loss"].backward()
    got = gradient(peft)
    (own_loss(peft, batch) / shares[0]).backward()
    wanted = gradient(peft)
    assert float(wanted.abs().max()) > 1e-3
    assert torch.allclose(got, wanted, atol=1e-7)
