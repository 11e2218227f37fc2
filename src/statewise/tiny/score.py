"""Scores of a model on the tiny tasks: greedy exact match, pass@k, multiple choice, cross-entropy of held-out text.

Small and self-contained, so that the build depends on nothing above it; ``statewise.evals`` is the general evaluator.
"""

from __future__ import annotations

from typing import Any

BATCH_SIZE = 64
MAX_NEW_TOKENS = 64  # a three-step solution in the longest style has under 60 tokens


def final_answer(text: str) -> str | None:
    """What follows the last ``####``, or None."""
    _, mark, answer = text.rpartition("####")
    return answer.strip() if mark else None


def generate(
    model: Any,
    tokenizer: Any,
    prompts: list[list[dict[str, str]]],
    temperature: float = 0.0,
) -> list[str]:
    """One completion a prompt; greedy at temperature 0, else unbiased samples (no top-k, no top-p)."""
    import torch

    flags: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    if temperature > 0:
        flags = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    texts: list[str] = []
    for start in range(0, len(prompts), BATCH_SIZE):
        inputs = tokenizer.apply_chat_template(
            prompts[start : start + BATCH_SIZE],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.no_grad():
            outputs = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, use_cache=True, **flags)
        completions = outputs[:, inputs["input_ids"].shape[1] :]
        texts.extend(tokenizer.batch_decode(completions, skip_special_tokens=True))
    return texts


def exact_match(model: Any, tokenizer: Any, rows: list[dict[str, Any]], temperature: float = 0.0) -> list[bool]:
    """Whether the final answer of each row's completion is right."""
    texts = generate(model, tokenizer, [row["prompt"] for row in rows], temperature)
    return [final_answer(text) == row["answer"] for text, row in zip(texts, rows, strict=True)]


def multiple_choice(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> list[bool]:
    """Whether the choice with the largest summed log-likelihood, given the chat prompt, is the right one."""
    pairs: list[tuple[list[int], list[int]]] = []
    for row in rows:
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        pairs.extend((prompt_ids, tokenizer.encode(choice, add_special_tokens=False)) for choice in row["choices"])
    scores = iter(log_likelihoods(model, pairs))
    picks = []
    for row in rows:
        values = [next(scores) for _ in row["choices"]]
        picks.append(values.index(max(values)) == row["answer"])
    return picks


def log_likelihoods(model: Any, pairs: list[tuple[list[int], list[int]]]) -> list[float]:
    """Sum over the target's tokens of log p(token | context, earlier tokens), in nats, for (context, target) pairs."""
    import torch

    sums: list[float] = []
    for start in range(0, len(pairs), 2 * BATCH_SIZE):
        batch = pairs[start : start + 2 * BATCH_SIZE]
        width = max(len(context) + len(target) for context, target in batch)
        tokens = torch.zeros(len(batch), width, dtype=torch.long)  # right padding: later columns can't be attended to
        mask = torch.zeros(len(batch), width, dtype=torch.bool)
        for index, (context, target) in enumerate(batch):
            tokens[index, : len(context) + len(target)] = torch.tensor(context + target)
            mask[index, len(context) : len(context) + len(target)] = True
        with torch.no_grad():
            logprobs = model(input_ids=tokens).logits[:, :-1].float().log_softmax(-1)
        picked = logprobs.gather(-1, tokens[:, 1:, None])[..., 0]
        sums.extend((picked * mask[:, 1:]).sum(-1).tolist())
    return sums


def text_cross_entropy(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> float:
    """Mean over tokens of -log p, in nats, of the texts; the first token of a text is context only."""
    encoded = [tokenizer.encode(row["text"], add_special_tokens=False) for row in rows]
    sums = log_likelihoods(model, [(ids[:1], ids[1:]) for ids in encoded])
    return -sum(sums) / sum(len(ids) - 1 for ids in encoded)
