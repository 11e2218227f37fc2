"""What a recipe will do before it does it: steps, tokens, memory. Reads the data and the model's config, no weights."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from statewise.models.onepass import chunk_rows
from statewise.recipe import Recipe
from statewise.training.budget import num_steps
from statewise.types import World

SAMPLED_STEPS = 8  # steps whose rollouts are looked at for the token estimate
STATE_COPIES = {"adamw": 2.0, "adamw_8bit": 0.5, "sgd": 0.0, "adafactor": 0.05}  # of the trained parameters' bytes
# Tensors of [tokens, hidden] that a transformer block keeps for backward, measured on a Llama of 135M parameters (sdpa,
# MLP 2.7 times as wide). A LoRA's float32 adapters keep float32 copies of narrower inputs.
KEPT_FULL, KEPT_LORA, KEPT_LORA_CAST = 26, 18, 46


@dataclass(frozen=True)
class Plan:
    """Estimates: tokens exact for the sampled steps, memory from parameter counts. Bytes and tokens.

    Where completions are sampled while it trains, tokens a step are unknown (0) and `longest` is the bound on new tokens.
    """

    num_examples: int | None
    steps: int | None
    tokens_a_step: float
    trained_tokens_a_step: float
    longest: int
    total_trained_tokens: float | None
    parameters: int
    trained_parameters: int
    weights_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    head_chunk_bytes: int
    preview: str
    warning: str | None = None

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.head_chunk_bytes
        )

    def words(self) -> list[str]:
        """The plan in lines for people."""
        steps = "until the budget is spent" if self.steps is None else f"{self.steps:,} steps"
        total = "" if self.total_trained_tokens is None else f", {self.total_trained_tokens:,.0f} trained tokens in all"
        parts = {
            "weights": self.weights_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activation_bytes,
            "head chunk": self.head_chunk_bytes,
        }
        memory = " + ".join(f"{name} {size / 2**20:,.0f}" for name, size in parts.items() if size >= 2**19)
        return [
            f"data:      {'endless' if self.num_examples is None else f'{self.num_examples:,} examples'}",
            f"tokens:    {steps}, {self._tokens_in_words()}{total}",
            f"memory:    about {self.total_bytes / 2**20:,.0f} MiB a process = {memory} MiB",
            *([f"warning:   {self.warning}"] if self.warning else []),
        ]

    def _tokens_in_words(self) -> str:
        if not self.tokens_a_step:
            return f"completions of at most {self.longest:,} tokens, sampled while it trains"
        return f"about {self.tokens_a_step:,.0f} tokens a step, of them {self.trained_tokens_a_step:,.0f} trained"


def plan(recipe: Recipe) -> Plan:
    """The estimates for one process. Raises the errors of bad data and of a model that can't be found."""
    from statewise.models.load import load_tokenizer
    from statewise.sources.plain import untemplated

    tokenizer = load_tokenizer(recipe.model)
    world = World(tokenizer=tokenizer, seed=recipe.seed, base_dir=recipe.base_dir)
    examples = recipe.source.num_examples(world)
    steps = num_steps(recipe.budget, recipe.batch, examples, redraws=recipe.draws > 1)
    whole, trained, longest, preview = _tokens(recipe, world, min(steps or SAMPLED_STEPS, SAMPLED_STEPS))
    if steps is None and recipe.budget.max_tokens is not None:
        total: float | None = float(recipe.budget.max_tokens)
    else:
        total = None if steps is None or not trained else trained * steps
    warning = untemplated(recipe.source, world)
    estimates = _memory(recipe, longest)
    return Plan(examples, steps, whole, trained, longest, total, preview=preview, warning=warning, **estimates)


def _tokens(recipe: Recipe, world: World, steps: int) -> tuple[float, float, int, str]:
    """Mean tokens and trained tokens a step, the longest sequence, and one sample with its mask shown."""
    from statewise.sources.templates import preview

    if recipe.source.needs_policy or recipe.source.models():
        return 0.0, 0.0, max(_bounds(recipe.source.model_dump()), default=0), ""
    taken = [recipe.source.sample(step, recipe.batch.rollouts, world) for step in range(max(steps, 1))]
    flat = [r for step in taken for r in step]
    whole, trained = sum(r.num_tokens for r in flat), sum(r.num_action_tokens for r in flat)
    return whole / len(taken), trained / len(taken), max(r.num_tokens for r in flat), preview(world.tokenizer, flat[0])


def _bounds(plain: Any) -> Iterator[int]:
    """Every `max_tokens` of a source and of the sources inside it."""
    if isinstance(plain, Mapping):
        for key, value in plain.items():
            yield from [value] if key == "max_tokens" and value else _bounds(value)
    elif isinstance(plain, list | tuple):
        for item in plain:
            yield from _bounds(item)


def _memory(recipe: Recipe, longest: int) -> dict[str, Any]:
    import torch

    from statewise.models.load import empty_policy

    model = empty_policy(recipe.model)
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    sizes = [(p.numel(), p.element_size(), p.requires_grad) for p in model.parameters()]
    trained_bytes = sum(n * size for n, size, on in sizes if on)
    rows = max(recipe.batch.micro_tokens or 0, (recipe.batch.micro_rows or 0) * longest, longest)
    rows = min(rows, recipe.batch.rollouts * longest) if longest else rows
    width = next(iter(model.parameters())).element_size()
    layers = 1 if recipe.model.gradient_checkpointing else config.num_hidden_layers
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = (
        rows
        * config.hidden_size
        * width
        * (_kept(recipe, width) * layers + (config.num_hidden_layers if layers == 1 else 0))
    )
    return {
        "parameters": sum(n for n, _, _ in sizes),
        "trained_parameters": sum(n for n, _, on in sizes if on),
        "weights_bytes": sum(n * size for n, size, _ in sizes),
        "gradient_bytes": trained_bytes,
        "optimizer_bytes": int(trained_bytes * STATE_COPIES[recipe.optim.optimizer]),
        "activation_bytes": kept,
        "head_chunk_bytes": 2 * 4 * config.vocab_size * min(rows, chunk_rows(config.vocab_size, device)),
    }


def _kept(recipe: Recipe, width: int) -> int:
    if recipe.model.adapter is None:
        return KEPT_FULL
    return KEPT_LORA if width >= 4 else KEPT_LORA_CAST


def free_bytes() -> int:
    """On the accelerator where there is one, else in the machine, what caches hold included."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    try:
        return int(re.findall(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())[0]) * 1024
    except (OSError, IndexError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
