"""Hinted Decoding: the batched decoder against the loop of its authors, one sample at a time and without a cache.

Both write the same texts by the same random numbers: 16 of GSM8K (or embedded problems) with SmolLM2-135M. The loop reads
both contexts anew for every token; the speed of each is its own new tokens a second. Then the decoder's time for 64 to 1,024
samples of the embedded model, and the slope of log seconds over log tokens, which is 1 where the cost is linear.

    python -m benchmarks.hinted [--model DIRECTORY] [--data gsm8k_train.jsonl]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.measure import growth, table
from benchmarks.sft_step import settings
from statewise.models.generate import stream
from statewise.models.hinted import HintedDecoder, HintedPrompt
from statewise.models.hinted_law import HintedLaw, draw_hinted
from statewise.models.load import LoadedPolicy, load_policy
from statewise.sources.hints import load_hint
from statewise.sources.templates import encode_prompt
from statewise.tiny.tasks import math_restyled
from statewise.types import Example

SIZES = (64, 128, 256, 512, 1024)


def pairs(tokenizer: Any, rows: list[tuple[str, str]], hint: str) -> list[HintedPrompt]:
    """The two contexts of questions and answers."""
    shown = load_hint(hint)
    examples = [Example(str(i), ({"role": "user", "content": q},), answer=a) for i, (q, a) in enumerate(rows)]
    return [
        HintedPrompt(encode_prompt(tokenizer, e.messages), shown.encode(tokenizer, e, e.answer, "####"))
        for e in examples
    ]


def questions(data: str | None, count: int) -> list[tuple[str, str]]:
    if data is None:
        return [(r["prompt"][0]["content"], r["completion"][0]["content"]) for r in math_restyled("train", count)]
    lines = Path(data).read_text(encoding="utf-8").splitlines()[:count]
    return [(row["question"], row["answer"]) for row in map(json.loads, lines)]


def loop(model: Any, prompt: HintedPrompt, law: HintedLaw, name: int) -> list[int]:
    """One text, both contexts read anew for every token."""
    tokens: list[int] = []
    uniforms = stream(law.seed, name, law.max_tokens)
    assert prompt.imitator is not None
    with torch.no_grad():
        while len(tokens) < law.max_tokens and not (tokens and tokens[-1] in law.stop_ids):
            imitator, plain = (
                model(input_ids=torch.tensor([[*ids, *tokens]]), use_cache=False, logits_to_keep=1).logits[:, -1]
                for ids in (prompt.imitator, prompt.plain)
            )
            fixed = torch.tensor([math.nan if tokens else 0.0])
            u = torch.tensor([uniforms[len(tokens)]], dtype=torch.float64)
            tokens.append(int(draw_hinted(imitator, plain, fixed, u, law).tokens))
    return tokens


def contest(policy: LoadedPolicy, prompts: list[HintedPrompt], law: HintedLaw) -> None:
    model = policy.model.eval()
    loop(model, prompts[0], HintedLaw(2, stop_ids=law.stop_ids), 0)
    started = time.perf_counter()
    slow = [loop(model, prompt, law, name) for name, prompt in enumerate(prompts)]
    seconds = [time.perf_counter() - started]
    decoder = HintedDecoder(model, pad_id=policy.pad_id)
    decoder.decode(prompts[:1], HintedLaw(2, stop_ids=law.stop_ids))
    started = time.perf_counter()
    fast = [list(c.tokens) for c in decoder.decode(prompts, law)]
    seconds.append(time.perf_counter() - started)
    speeds = [sum(map(len, texts)) / s for texts, s in zip((slow, fast), seconds, strict=True)]
    rows = [
        [name, f"{s:.1f}", sum(map(len, texts)), f"{speed:,.1f}", f"{speed / speeds[0]:.1f}"]
        for name, s, texts, speed in zip(("loop", "statewise"), seconds, (slow, fast), speeds, strict=True)
    ]
    print(table(rows, ("decoder", "seconds", "new tokens", "tokens/s", "x loop")))
    same = sum(a == b for a, b in zip(slow, fast, strict=True))
    print(f"{same} of {len(prompts)} texts are the same tokens")


def growing(policy: LoadedPolicy) -> None:
    """More and more samples of the embedded model."""
    law = HintedLaw(64, temperature=1.0, stop_ids=policy.stop_ids)
    prompts = pairs(policy.tokenizer, questions(None, SIZES[-1]), "echo")

    def work(size: int) -> int:
        made = HintedDecoder(policy.model, pad_id=policy.pad_id).decode(prompts[:size], law)
        return sum(len(completion.tokens) for completion in made)

    growth(work, SIZES)


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of SmolLM2-135M or another causal language model")
    parser.add_argument("--data", help="gsm8k_train.jsonl, or another file with question and answer")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    arguments = parser.parse_args()
    arguments.full = True
    policy = load_policy(settings(arguments))
    prompts = pairs(policy.tokenizer, questions(arguments.data, arguments.samples), "instruct")
    contest(policy, prompts, HintedLaw(arguments.max_tokens, stop_ids=policy.stop_ids))
    growing(load_policy("tiny"))


if __name__ == "__main__":
    main()
