"""Trains the embedded base model: tokenizer, Qwen3-architecture model of 0.85M parameters, ``build.json``.

The number of steps is fixed, not the time, and every batch is a function of (seed, step), so one machine with one
thread count gives the same bytes each time. Training stops at partial mastery on purpose: a base that has nothing left
to learn, or nothing to forget, is useless for studies of post-training.
"""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from statewise.errors import DataError
from statewise.tiny import mixture, score, tasks
from statewise.tiny.tokenizer import train_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

MAX_LENGTH = 512  # positions
TOKENIZER_DOCUMENTS = 20_000
NUM_SAMPLES = 8  # a problem, for the mean and the best at temperature 1

Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class BuildRecipe:
    """Everything that decides the weights, beside the seed. Lengths in tokens, learning rate per step."""

    steps: int = 425
    batch_rows: int = 32
    row_tokens: int = 192
    lr: float = 3e-3
    warmup_steps: int = 100
    decay_steps: int = 100
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    vocab_size: int = 512
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 384
    mixture: dict[str, float] = field(default_factory=lambda: dict(mixture.MIXTURE))
    evaluate_every: int = 50
    curve_items: int = 100  # test items a task at each point of the learning curve
    final_items: int = 400  # at most, for facts and beliefs: they have fewer distinct test questions


def build(
    out: Path, seed: int = 0, recipe: BuildRecipe | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Trains the base model and writes it to ``out``, which holds the old build or the new one, never half of one.

    Args:
        out: directory for model.safetensors (bf16), config, generation config, tokenizer and build.json.
        seed: of the initial weights and of the data.
        recipe: the default is the recipe of the shipped model (under 15 minutes on 2 cores).
        progress: called every 10 steps with step, steps and loss (nats a token), and with the learning curve's points.

    Returns:
        What build.json holds: recipe, seed, versions, parameter count, learning curve, scores of the saved weights.

    Raises:
        DataError: ``out`` exists and is not an earlier build.
    """
    import torch

    _check_replaceable(out)
    recipe = recipe or BuildRecipe()
    torch.manual_seed(seed)
    tokenizer = _make_tokenizer(seed, recipe)
    model = _make_model(tokenizer, recipe)
    curve = _train(model, tokenizer, seed, recipe, progress)
    report = {
        "seed": seed,
        "recipe": asdict(recipe),
        "parameters": model.num_parameters(),
        "versions": _versions(),
        "threads": torch.get_num_threads(),
        "tokens": recipe.steps * recipe.batch_rows * recipe.row_tokens,
        "curve": curve,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        made = Path(scratch) / "new"
        model.bfloat16().save_pretrained(made)
        tokenizer.save_pretrained(made)
        saved = type(model).from_pretrained(made, dtype=torch.float32)
        report["scores"] = evaluate(saved, tokenizer, recipe.final_items, samples=NUM_SAMPLES)
        (made / "build.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        if out.exists():
            out.rename(Path(scratch) / "old")
        made.rename(out)
    return report


def _check_replaceable(out: Path) -> None:
    if out.exists() and not (out / "build.json").is_file() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"out: {out} exists and holds no build.json, so it is no earlier build; name a new directory.")


def evaluate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, items: int, samples: int = 0
) -> dict[str, float]:
    """Scores on at most ``items`` rows a task; with ``samples`` also mean and best of that many at temperature 1."""
    import torch

    training = model.training
    model.eval()
    scores: dict[str, float] = {}
    problems = tasks.math_problems("test", items)
    right = score.exact_match(model, tokenizer, problems)
    for steps in (2, 3):
        scores[f"math_{steps}_step"] = _mean([r for r, p in zip(right, problems, strict=True) if p["steps"] == steps])
    scores["math"] = _mean(right)
    for name in ("facts", "beliefs"):
        available = len(tasks.knowledge.questions(name, "test"))
        rows = tasks.rows(f"tiny:{name}", "test", min(items, available))
        scores[name] = _mean(score.multiple_choice(model, tokenizer, rows))
    scores["text_nats"] = round(score.text_cross_entropy(model, tokenizer, tasks.texts("test", items)), 4)
    if samples:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            draws = [score.exact_match(model, tokenizer, problems, temperature=1.0) for _ in range(samples)]
        scores["math_sampled"] = _mean([value for draw in draws for value in draw])
        scores[f"math_pass_at_{samples}"] = _mean([any(column) for column in zip(*draws, strict=True)])
    model.train(training)
    return scores


def _mean(values: list[bool]) -> float:
    return round(sum(values) / max(len(values), 1), 4)


def _make_tokenizer(seed: int, recipe: BuildRecipe) -> PreTrainedTokenizerBase:
    random = Random(f"tokenizer {seed}")
    documents = (mixture.draw_document(random, recipe.mixture) for _ in range(TOKENIZER_DOCUMENTS))
    return train_tokenizer(documents, recipe.vocab_size, MAX_LENGTH)


def _make_model(tokenizer: PreTrainedTokenizerBase, recipe: BuildRecipe) -> Qwen3ForCausalLM:
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.hidden_size // recipe.num_heads,  # the library's default is 128 whatever the hidden size
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config).train()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, use_cache=True
    )
    return model


def _batches(tokenizer: PreTrainedTokenizerBase, seed: int, recipe: BuildRecipe) -> Iterator[torch.Tensor]:
    """Endless [batch_rows, row_tokens] batches: fresh documents, concatenated, cut into rows."""
    import torch

    random = Random(f"pretraining {seed}")
    needed = recipe.batch_rows * recipe.row_tokens
    stream: list[int] = []
    while True:
        while len(stream) < needed:
            documents = [mixture.draw_document(random, recipe.mixture) for _ in range(64)]
            for ids in tokenizer(documents, add_special_tokens=False)["input_ids"]:
                stream.extend(ids)
        yield torch.tensor(stream[:needed]).view(recipe.batch_rows, recipe.row_tokens)
        stream = stream[needed:]


def learning_rate(step: int, recipe: BuildRecipe) -> float:
    """Linear warm-up, constant, linear down to 0 over the last ``decay_steps``."""
    rising, falling = (step + 1) / recipe.warmup_steps, (recipe.steps - step) / recipe.decay_steps
    return recipe.lr * min(1.0, rising, falling)


def _train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    recipe: BuildRecipe,
    progress: Progress | None,
) -> list[dict[str, float]]:
    import torch

    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas)
    batches = _batches(tokenizer, seed, recipe)
    curve: list[dict[str, float]] = []
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        tokens = next(batches)
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        point: dict[str, Any] = {"step": step + 1, "steps": recipe.steps, "loss": round(loss.item(), 4)}
        if (step + 1) % recipe.evaluate_every == 0:
            point.update(evaluate(model, tokenizer, recipe.curve_items))
            curve.append(point)
        if progress and ((step + 1) % 10 == 0 or "math" in point):
            progress(point)
    return curve


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    packages = {name: version(name) for name in ("torch", "transformers", "tokenizers", "safetensors")}
    return {"python": platform.python_version(), **packages}
