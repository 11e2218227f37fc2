"""Scoring sequences through the one-pass head: no stored logits, float32 statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from statewise.models.head import FullLogits, Head, Projection, backbone, split_head
from statewise.models.onepass import chunk_rows, statistics
from statewise.models.precise import can_widen, exact_products, widened
from statewise.models.topk import TopK
from statewise.types import TokenStats

NEEDS = ("logprobs", "entropy", "varentropy", "fourth", "rank", "topk")
BATCH_TOKENS, CPU_BATCH_TOKENS = 8192, 1024  # a CPU's caches hold the states of no more
BLOCK_BYTES = 2**20  # logits that a CPU's passes read at a time, so that all but the first find them in its cache


def token_stats(
    hidden: Tensor,
    head: Head | nn.Module | Tensor,
    targets: Tensor,
    *,
    entropy: bool = True,
    dtype: torch.dtype | None = None,
) -> TokenStats:
    """Statistics of `targets` [...] at `hidden` [..., D], chunk by chunk, under no_grad.

    head: a `Head`, a linear layer, or a weight [V, D]. Returns TokenStats(logprobs, entropy) of shape [...], float32
    (float64 for float64 inputs), nats; `.phi` is log p + H.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    if isinstance(head, Tensor):
        projection = Projection(((rows, head),))
    else:
        projection = (head if isinstance(head, Head) else Head(head)).project(rows)
    values = score_rows(
        projection, targets.reshape(-1), ("logprobs", "entropy") if entropy else ("logprobs",), dtype=dtype
    )
    shaped = {name: value.reshape(targets.shape) for name, value in values.items()}
    return TokenStats(shaped["logprobs"], shaped.get("entropy"))


@torch.no_grad()
def score_rows(
    projection: Projection | FullLogits,
    targets_N: Tensor,
    needs: Sequence[str] = ("logprobs",),
    *,
    temperature: float = 1.0,
    topk: int = 20,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """{name: [N]} of log p(y), entropy, varentropy sum p (log p + H)^2 (nats^2), `fourth` sum p (log p + H)^4 (nats^4), rank
    of y (0 = the mode), and `topk_logprobs`/`topk_ids` [N, K]; logits are divided by `temperature` before all of them."""
    unknown = set(needs) - set(NEEDS)
    if unknown:
        raise ValueError(f"needs: received {sorted(unknown)}, expected among {NEEDS}")
    parts: dict[str, list[Tensor]] = {}
    size = chunk_rows(projection.num_tokens, projection.device)
    for start in range(0, projection.num_rows, size):
        part = slice(start, min(start + size, projection.num_rows))
        logits = projection.logits(part, dtype)
        if temperature != 1.0:
            logits = logits / temperature
        for rows in _blocks(logits):
            for name, value in _score_chunk(logits[rows], targets_N[part][rows], needs, topk).items():
                parts.setdefault(name, []).append(value)
    if not parts:
        empty = torch.zeros(0, device=targets_N.device)
        return {name: empty for name in needs if name != "topk"}
    return {name: torch.cat(values) for name, values in parts.items()}


def _blocks(logits: Tensor) -> list[slice]:
    size = max(1, BLOCK_BYTES // (4 * logits.shape[1])) if logits.device.type == "cpu" else len(logits)
    return [slice(start, start + size) for start in range(0, len(logits), size)]


def _score_chunk(logits: Tensor, targets: Tensor, needs: Sequence[str], topk: int) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    if "rank" in needs:
        out["rank"] = (logits > logits.gather(-1, targets[:, None])).sum(-1)
    if "topk" in needs:
        top = logits.topk(min(topk, logits.shape[-1]), dim=-1)
        out["topk_logprobs"] = top.values - logits.logsumexp(-1, keepdim=True)
        out["topk_ids"] = top.indices
    centred = {"varentropy", "fourth"} & set(needs)
    wants = "entropy" in needs or bool(centred)
    if not wants and "logprobs" not in needs:
        return out
    logprobs, entropy, exps, total = statistics(logits, targets, entropy=wants)
    out["logprobs"] = logprobs
    if entropy is None:
        return out
    out["entropy"] = entropy
    if centred:
        squares = logits.sub_((total.log() - entropy)[:, None]).clamp_min_(-1e9).square_()
        out["varentropy"] = torch.linalg.vecdot(exps, squares) / total
        if "fourth" in needs:
            # (e z^2) z^2, since z^4 of a masked id overflows.
            out["fourth"] = torch.linalg.vecdot(exps.mul_(squares), squares) / total
    return out


class InProcessScorer:
    """The `Scorer` protocol on a transformers or PEFT model.

    batch_tokens: padded tokens a forward pass (None: as many as the device is quickest with, 1,024 on a CPU and 8,192
    elsewhere); dtype: of the head's products (None: the model's).
    frozen: the weights never change, so that a float32 copy of a bf16 head may be kept, which makes float32 products cheap.
    """

    def __init__(
        self,
        model: Any,
        *,
        pad_id: int,
        batch_tokens: int | None = None,
        dtype: torch.dtype | None = None,
        frozen: bool = False,
    ):
        on_cpu = next(model.parameters()).device.type == "cpu"
        self.batch_tokens = batch_tokens or (CPU_BATCH_TOKENS if on_cpu else BATCH_TOKENS)
        self.model, self.pad_id, self.dtype = model, pad_id, dtype
        self.frozen, self.widened = frozen, False
        self._head: Head | bool | None = False

    def score(
        self, sequences: Sequence[Sequence[int]], needs: Sequence[str] = ("logprobs",), *, temperature: float = 1.0
    ) -> list[dict[str, Any]]:
        """Per sequence {name: list with one value a token}; a sequence's first token has no state: 0 there."""
        out: list[dict[str, Any]] = []
        for sequence, values in zip(
            sequences, self.score_at(sequences, _after_first(sequences), needs, temperature=temperature), strict=True
        ):
            first: dict[str, Any] = {name: [] if name.startswith("topk") else 0.0 for name in values}
            out.append({n: ([first[n]] if len(sequence) else []) + v.tolist() for n, v in values.items()})
        return out

    def topk(self, sequences: Sequence[Sequence[int]], k: int) -> list[TopK]:
        """Log-probabilities of the tokens and of the k most probable ones at each; all of them where k is the vocabulary."""
        needs = ("logprobs", "topk") if k else ("logprobs",)
        return [_as_topk(values) for values in self.score_at(sequences, _after_first(sequences), needs, topk=k)]

    def score_at(
        self,
        sequences: Sequence[Sequence[int]],
        masks: Sequence[Sequence[bool]],
        needs: Sequence[str] = ("logprobs",),
        *,
        temperature: float = 1.0,
        topk: int = 20,
        report: Callable[[int], None] = lambda tokens: None,
    ) -> list[dict[str, np.ndarray]]:
        """Per sequence {name: [n]} of its n tokens where the mask is true; only those go through the head.

        report(tokens) is called after each forward pass. Raises ValueError where a mask has another length, or is true at
        a first token, which has no state.
        """
        for index, (sequence, mask) in enumerate(zip(sequences, masks, strict=True)):
            if len(sequence) != len(mask) or (len(mask) and mask[0]):
                raise ValueError(
                    f"sequence {index}: received {len(sequence)} tokens and a mask of {len(mask)}; expected a value each, "
                    "false for the first"
                )
        results: list[dict[str, np.ndarray]] = [{} for _ in sequences]
        training = self.model.training
        self.model.eval()
        try:
            for group in self.groups(sequences):
                own = ([sequences[i] for i in group], [masks[i] for i in group])
                found = self._score(*own, needs, temperature, topk)
                for index, values in zip(group, found, strict=True):
                    results[index] = values
                report(sum(len(sequences[i]) for i in group))
        finally:
            self.model.train(training)
        return results

    def groups(self, sequences: Sequence[Sequence[int]]) -> list[list[int]]:
        """Indices by falling length, cut where rows x longest passes `batch_tokens`."""
        order = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i))
        groups: list[list[int]] = []
        for index in order:
            longest = len(sequences[groups[-1][0]]) if groups else 0
            if groups and (len(groups[-1]) + 1) * longest <= self.batch_tokens:
                groups[-1].append(index)
            else:
                groups.append([index])
        return groups

    @torch.no_grad()
    def _score(
        self,
        sequences: list[Sequence[int]],
        masks: list[Sequence[bool]],
        needs: Sequence[str],
        temperature: float,
        topk: int,
    ) -> list[dict[str, np.ndarray]]:
        projection, targets = self.states(sequences, masks)
        with exact_products() if self.widened else nullcontext():
            flat = score_rows(projection, targets, needs, temperature=temperature, topk=topk, dtype=self.dtype)
        stops = np.cumsum([sum(mask) for mask in masks])[:-1]
        lists = {name: np.split(value.cpu().numpy(), stops) for name, value in flat.items()}
        return [{name: values[row] for name, values in lists.items()} for row in range(len(sequences))]

    @torch.no_grad()
    def states(
        self, sequences: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]
    ) -> tuple[Projection | FullLogits, Tensor]:
        """The states of the tokens where the masks are true, and those tokens [N], sequence by sequence: one forward pass."""
        width = max(1, *(len(s) for s in sequences))
        device = next(self.model.parameters()).device
        ids = torch.full((len(sequences), width), self.pad_id, dtype=torch.long)
        seen, wanted = torch.zeros(len(sequences), width, dtype=torch.long), torch.zeros(len(sequences), width).bool()
        for row, (sequence, mask) in enumerate(zip(sequences, masks, strict=True)):
            ids[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.long)
            seen[row, : len(sequence)] = 1
            wanted[row, : len(sequence)] = torch.tensor(mask, dtype=torch.bool)
        ids, seen, wanted = ids.to(device), seen.to(device), wanted.to(device)
        at = wanted[:, 1:].nonzero(as_tuple=True)
        return self.project({"input_ids": ids, "attention_mask": seen}, at), ids[:, 1:][at]

    def project(self, inputs: dict[str, Tensor], at: tuple[Tensor, ...]) -> Projection | FullLogits:
        if self._head is False:
            self._head = split_head(self.model)
            if self.frozen and self.dtype == torch.float32 and isinstance(self._head, Head) and can_widen(self._head):
                self._head, self.widened = widened(self._head), True
        if isinstance(self._head, Head):
            hidden = backbone(self.model)(**inputs, use_cache=False).last_hidden_state
            return self._head.project(hidden[:, :-1][at])
        return FullLogits(self.model(**inputs, use_cache=False).logits[:, :-1][at])


def _after_first(sequences: Sequence[Sequence[int]]) -> list[list[bool]]:
    """Masks of all tokens but the first of each."""
    return [[False] * min(1, len(s)) + [True] * (len(s) - 1) for s in sequences]


def _as_topk(values: dict[str, np.ndarray]) -> TopK:
    """With an empty place for the first token."""
    logprobs = values["logprobs"].astype(np.float32)
    nothing = np.zeros((len(logprobs), 0))
    ids, best = values.get("topk_ids", nothing), values.get("topk_logprobs", nothing)
    return TopK(
        np.concatenate([[0.0], logprobs]).astype(np.float32),
        np.concatenate([np.full((1, ids.shape[1]), -1), ids]).astype(np.int64),
        np.concatenate([np.full((1, best.shape[1]), -np.inf), best]).astype(np.float32),
    )
