"""What a run uses beside the tokens it trains: tokens sampled, tokens of teachers, and floating-point operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from statewise.training.distributed import total
from statewise.types import Batch, Completion, Sampling

FORWARD, BACKWARD_INPUTS, BACKWARD_WEIGHTS = 2.0, 2.0, 2.0  # operations a parameter and token


@dataclass
class Usage:
    """Counts of this rank since they were last taken.

    generated_tokens: sampled by the policy; teacher_tokens: sampled or scored by another model.
    flops: 2 a parameter and token forward, 2 backward to the inputs, 2 to trained weights; attention's products of
    queries with keys are left out, and so are embeddings that are only looked up.
    """

    generated_tokens: int = 0
    teacher_tokens: int = 0
    flops: float = 0.0

    def take(self, accelerator: Any) -> Usage:
        """The counts of all ranks, which begin anew."""
        sums = total([float(self.generated_tokens), float(self.teacher_tokens), self.flops], accelerator)
        self.generated_tokens, self.teacher_tokens, self.flops = 0, 0, 0.0
        return Usage(int(sums[0]), int(sums[1]), float(sums[2]))

    def train(self, batches: Sequence[Batch], model: Any) -> None:
        """A forward and a backward pass over the batches."""
        weights = BACKWARD_WEIGHTS * sum(p.numel() for p in model.parameters() if p.requires_grad)
        a_token = forward_flops(model) * (1 + BACKWARD_INPUTS / FORWARD) + weights
        self.flops += a_token * sum(num_tokens(batch) for batch in batches)


def num_tokens(batch: Batch) -> int:
    """Tokens of a batch without its padding."""
    return int((batch.sequence_BT >= 0).sum())


def forward_flops(model: Any) -> float:
    """Operations a token of a forward pass."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    tied = outputs is not None and inputs.weight is outputs.weight
    return FORWARD * (sum(p.numel() for p in model.parameters()) - (0 if tied else inputs.weight.numel()))


class CountedEngine:
    """A sampler or scorer whose tokens are counted: as `name`, where it is given, and as operations.

    model: None where the operations are another machine's.
    """

    def __init__(self, engine: Any, usage: Usage, model: Any, name: str | None = None):
        self.engine, self.usage, self.name = engine, usage, name
        self.flops_a_token = 0.0 if model is None else forward_flops(model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, rows: Sequence[int] | None = None
    ) -> list[Completion]:
        """As the engine's; prompts are read once a completion."""
        found: list[Completion] = self.engine.generate(prompts, sampling, rows=rows)
        self.count(prompts, found)
        return found

    def count(self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> None:
        """Count completions as sampled."""
        self._add(sum(len(c.tokens) for c in completions), sum(map(len, prompts)))

    def score(self, sequences: Sequence[Sequence[int]], *args: Any, **options: Any) -> Any:
        """As the engine's."""
        self._add(sum(map(len, sequences)))
        return self.engine.score(sequences, *args, **options)

    def topk(self, sequences: Sequence[Sequence[int]], k: int) -> Any:
        """As the engine's."""
        self._add(sum(map(len, sequences)))
        return self.engine.topk(sequences, k)

    def _add(self, tokens: int, read: int = 0) -> None:
        if self.name is not None:
            setattr(self.usage, self.name, getattr(self.usage, self.name) + tokens)
        self.usage.flops += self.flops_a_token * (tokens + read)
