"""The K most probable next tokens at every token of a sequence, and logits that are made of them.

What is not among the K is one bucket of mass 1 - sum. It is spread evenly over its tokens where logits are asked for, so that
a divergence on the K tokens and one bucket is exact, and none may look inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from statewise.types import Batch

# Mass of the bucket that float32 log-probabilities can't tell from 0.
ROUNDING = 2.0**-20


@dataclass(frozen=True)
class TopK:
    """Of one sequence of T tokens; index t speaks of token t given those before it, and index 0 is empty.

    logprobs [T] of the sequence's own tokens, float32; ids [T, K] int64, -1 where there are fewer; values [T, K] their
    log-probabilities; all in nats.
    """

    logprobs: np.ndarray
    ids: np.ndarray
    values: np.ndarray


def padded(parts: Sequence[TopK]) -> list[TopK]:
    """All with as many places K as the widest."""
    width = max((part.ids.shape[1] for part in parts), default=0)
    return [TopK(part.logprobs, _widened(part.ids, width, -1), _widened(part.values, width, -np.inf)) for part in parts]


def _widened(grid: np.ndarray, width: int, fill: float) -> np.ndarray:
    lacking = width - grid.shape[1]
    return grid if not lacking else np.pad(grid, ((0, 0), (0, lacking)), constant_values=fill)


@dataclass(frozen=True)
class TopKGrid:
    """Of a batch, like `training.learner.Dense`. ids_BTK, values_BTK: column t speaks of token t."""

    ids_BTK: Tensor
    values_BTK: Tensor
    num_tokens: int
    temperature: float = 1.0

    def take(self, at: tuple[Tensor, ...]) -> TopKRows:
        """The rows that predict the tokens at columns `at[1] + 1` of rows `at[0]`."""
        place = (at[0], at[1] + 1)
        return TopKRows(self.ids_BTK[place].long(), self.values_BTK[place], self.num_tokens, self.temperature)


@dataclass(frozen=True)
class TopKRows:
    """Logits [N, V] made of the K most probable tokens. `temperature`: that the logits are divided by."""

    ids_NK: Tensor
    values_NK: Tensor
    num_tokens: int
    temperature: float = 1.0

    @property
    def num_rows(self) -> int:
        return self.ids_NK.shape[0]

    @property
    def whole(self) -> bool:
        """Whether no token is outside."""
        return self.ids_NK.shape[1] >= self.num_tokens

    def logits(self, rows: slice, dtype: Any = None) -> Tensor:
        """log p of the K tokens and, of each of the others, log((1 - sum) / (V - K)).

        Ids of -1 or above the vocabulary belong to neither, and their mass is left out.
        """
        ids, values = self.ids_NK[rows], self.values_NK[rows].float()
        inside = (ids >= 0) & (ids < self.num_tokens)
        count = (self.num_tokens - inside.sum(-1, keepdim=True)).clamp_min(1)
        # No token outside is more probable than the least of those inside, and rounding may leave less than nothing.
        bound = values.where(inside, torch.inf).amin(-1, keepdim=True) + count.log()
        outside = (1 - values.exp().sum(-1, keepdim=True)).clamp_min(ROUNDING).log()
        rest = torch.minimum(outside, bound) - count.log()
        # Column V takes what belongs nowhere.
        out = rest.expand(-1, self.num_tokens + 1).scatter(-1, ids.where(inside, self.num_tokens), values)
        out = out[:, : self.num_tokens]
        return out if self.temperature == 1.0 else out / self.temperature


def grid_of(batch: Batch, sequences: Sequence[TopK], num_tokens: int) -> TopKGrid:
    """The rows of `sequences`, one for each sequence of the batch in its order, where the sequences lie in it."""
    parts = padded(sequences)
    width = parts[0].ids.shape[1] if parts else 0
    shape = (*batch.tokens_BT.shape, width)
    ids, values = torch.full(shape, -1, dtype=torch.long), torch.full(shape, -torch.inf)
    where = batch.sequence_BT.cpu()
    for index, part in enumerate(parts):
        place = (where == index).nonzero(as_tuple=True)
        ids[place], values[place] = torch.from_numpy(part.ids), torch.from_numpy(part.values)
    device = batch.tokens_BT.device
    return TopKGrid(ids.to(device), values.to(device), num_tokens, batch.temperature)


def sequences_of(batch: Batch) -> list[list[int]]:
    """The token ids of every sequence of the batch, in its order."""
    where, tokens = batch.sequence_BT.cpu(), batch.tokens_BT.cpu()
    return [tokens[where == index].tolist() for index in range(batch.num_sequences)]
