"""Scoring a data set: phi of every response token, against one sample at a time with full logits.

The loop is how a calculator of phi is written down first: the logits of all positions in float32, log-softmax, entropy, the
label's log-probability. It gives log p and H; statewise also the varentropy, the fourth moment and the rank. Both score the
same answers of GSM8K (or embedded ones) under SmolLM2-135M; the tokens counted are all that are read. Then statewise's time for
64 to 1,024 embedded samples, and the slope of log seconds over log tokens, which is 1 where the cost is linear.

    python -m benchmarks.score [--model DIRECTORY] [--data gsm8k_train.jsonl] [--dtype float32]
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

from benchmarks.hinted import SIZES, questions
from benchmarks.measure import growth, in_turn, median, ratio, table
from benchmarks.sft_step import settings
from statewise.models.load import LoadedPolicy, load_policy
from statewise.models.score import InProcessScorer
from statewise.onpolicy.cll import score_sequences
from statewise.sources.templates import encode_prompt

Sample = tuple[list[int], list[bool]]


def samples(policy: LoadedPolicy, rows: Sequence[tuple[str, str]]) -> list[Sample]:
    """Token ids of question and answer through the chat template, and which of them are the answer's."""
    found = []
    for question, answer in rows:
        prompt = list(encode_prompt(policy.tokenizer, ({"role": "user", "content": question},)))
        own = [*policy.tokenizer(answer, add_special_tokens=False)["input_ids"], policy.stop_ids[0]]
        found.append(([*prompt, *own], [False] * len(prompt) + [True] * len(own)))
    return found


@torch.no_grad()
def loop(model: Any, texts: Sequence[Sample]) -> list[np.ndarray]:
    """phi of every sample, a forward pass each."""
    found = []
    for tokens, mask in texts:
        ids = torch.tensor([tokens])
        logp = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        phi = logp.gather(-1, ids[0, 1:, None])[:, 0] + entropy
        found.append(phi[torch.tensor(mask[1:])].numpy())
    return found


def statewise(policy: LoadedPolicy, texts: Sequence[Sample], batch_tokens: int | None) -> list[np.ndarray]:
    settings = {"batch_tokens": batch_tokens, "dtype": torch.float32, "frozen": True}
    scorer = InProcessScorer(policy.model, pad_id=policy.pad_id, **settings)
    return [s.phi for s in score_sequences(scorer, [t for t, _ in texts], [m for _, m in texts])]


def contest(policy: LoadedPolicy, texts: list[Sample], rounds: int, batch_tokens: int | None) -> None:
    policy.model.eval()
    read, scored = sum(len(t) for t, _ in texts), sum(sum(m) for _, m in texts)
    print(f"{len(texts)} samples, {read:,} tokens, {scored:,} of them answers, {torch.get_num_threads()} thread(s)")
    results: dict[str, list[np.ndarray]] = {}
    contestants = {
        "loop": lambda: results.update(loop=loop(policy.model, texts)),
        "statewise": lambda: results.update(statewise=statewise(policy, texts, batch_tokens)),
    }
    times = in_turn(contestants, rounds)
    rows = [
        [name, f"{median(s):.1f}", f"{read / median(s):,.0f}", f"{ratio(times['loop'], s):.2f}"]
        for name, s in times.items()
    ]
    print(table(rows, ("scorer", "median s", "tokens/s", "x loop")))
    gaps = np.abs(np.concatenate(results["loop"]) - np.concatenate(results["statewise"]))
    print(f"phi differs by {gaps.mean():.1e} nats on average, at most {gaps.max():.1e}")


def growing(policy: LoadedPolicy) -> None:
    """More and more samples of the embedded model."""
    texts = samples(policy, questions(None, SIZES[-1]))
    statewise(policy, texts[:8], None)

    def work(size: int) -> int:
        statewise(policy, texts[:size], None)
        return sum(len(tokens) for tokens, _ in texts[:size])

    growth(work, SIZES)


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of SmolLM2-135M or another causal language model")
    parser.add_argument("--data", help="gsm8k_train.jsonl, or another file with question and answer")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batch-tokens", type=int, help="padded tokens a forward pass; default: the command's")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    arguments.full = True
    policy = load_policy(settings(arguments))
    contest(
        policy, samples(policy, questions(arguments.data, arguments.samples)), arguments.rounds, arguments.batch_tokens
    )
    growing(load_policy("tiny"))


if __name__ == "__main__":
    main()
