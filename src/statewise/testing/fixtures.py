"""A small causal language model in float64 and rollouts with every column that a component may read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, get_args

import torch
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from statewise.errors import RecipeError
from statewise.objective import Term
from statewise.training.learner import Learner
from statewise.types import AUTHORS, Batch, Example, Rollout, Segment, derive_seed

VOCAB, HIDDEN = 29, 16
# Prompt and action lengths of the rollouts: ragged, one with a single action, one with an environment turn between actions.
SHAPES = ((3, 5), (2, 1), (4, 7), (1, 3), (2, 6), (3, 2))


@cache
def _model(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).double()
        with torch.no_grad():
            model.lm_head.weight.normal_(0, 0.5)
    return model.eval()


def tiny_learner(terms: Sequence[Term], *, seed: int = 0, logit_scale: float = 1.0) -> Learner:
    """A fresh float64 learner of 5,000 parameters; `logit_scale` multiplies its logits, to reach extreme ones."""
    from copy import deepcopy

    model = deepcopy(_model(seed))
    with torch.no_grad():
        model.lm_head.weight.mul_(logit_scale)
    return Learner(model, terms)


def rollouts(columns: Iterable[str] = (), *, seed: int = 0) -> list[Rollout]:
    """Six ragged rollouts in three groups; each name of `columns` gets random values of its kind a token.

    Names that end in `logprobs` are at most 0; `*entropy`, `*nll` and `*ratio` are positive; others are standard normal.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "battery"))
    out = []
    for index, (num_prompt, num_actions) in enumerate(SHAPES):
        draw = torch.randint(2, VOCAB, (num_prompt + num_actions + 2,), generator=generator).tolist()
        author = AUTHORS[2 + index % 3]
        actions = tuple(draw[num_prompt : num_prompt + num_actions])
        segments = [Segment(tuple(draw[:num_prompt]), "prompt"), Segment(actions, author, True)]
        if index == 2:
            segments += [Segment(tuple(draw[-2:]), "environment"), Segment(actions[:2], "dataset", True)]
        rollout = Rollout(tuple(segments), Example(id=f"sample-{index}"), group=index // 2)
        values = {name: _values(name, rollout.num_tokens, generator) for name in sorted(columns)}
        out.append(rollout.with_columns(**values))
    return out


def _values(name: str, count: int, generator: torch.Generator) -> list[float]:
    noise = torch.randn(count, generator=generator, dtype=torch.float64)
    if name.endswith("logprobs"):
        noise = -noise.abs() - 0.05
    elif name.endswith(("entropy", "nll", "ratio")):
        noise = noise.abs() + 0.1
    return noise.tolist()


def with_dense(batch: Batch, names: Iterable[str], *, seed: int = 1) -> Batch:
    """The batch with other models' logits under `names`; seed 0 is the policy itself."""
    for name in sorted(names):
        other = tiny_learner([], seed=seed)
        batch = batch.with_dense(**{name: other(batch, mode="reference")})
    return batch


def sample_settings(cls: type[BaseModel]) -> Any:
    """An object of the class with its defaults, and a plain value for every field that has none."""
    if getattr(cls, "example", None) is not None:
        return cls(**cls.example)  # type: ignore[attr-defined]
    values = {name: _plain(f.annotation) for name, f in cls.model_fields.items() if f.is_required()}
    try:
        return cls(**values)
    except ValueError as error:
        raise RecipeError(
            f"{cls.__name__}: no object could be made from guessed settings {values} ({error}); give the class "
            "`example: ClassVar[dict] = {...}` with settings that make sense."
        ) from None


def _plain(annotation: Any) -> Any:
    options = get_args(annotation)
    if options:
        return options[0] if isinstance(options[0], str) else _plain(options[0])
    defaults: dict[Any, Any] = {int: 1, float: 0.5, str: "rewards", bool: True}
    return defaults.get(annotation, PydanticUndefined)


def is_dense(name: str) -> bool:
    """Whether a read name is another model's logits rather than a column."""
    return name.endswith("_logits")
