"""The one module that accelerate wraps: backbone, one-pass head and terms, so that DDP and FSDP hooks see everything."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from statewise.models.head import FullLogits, Head, Projection, backbone, split_head
from statewise.models.onepass import Rows, objective_sum
from statewise.models.score import score_rows
from statewise.objective import WHOLE, Term, factors, whole_factors
from statewise.training.packing import model_inputs
from statewise.types import Batch, TokenStats


@dataclass(frozen=True)
class Dense:
    """Another model's projection at every place of a batch: row b * T + t predicts the token after t."""

    projection: Projection | FullLogits
    width: int

    def take(self, at: tuple[Tensor, ...]) -> Projection | FullLogits:
        """The rows that predict the tokens at columns `at[1] + 1` of rows `at[0]`."""
        index = at[0] * self.width + at[1]
        if isinstance(self.projection, FullLogits):
            return replace(self.projection, full=self.projection.full[index])
        pairs = tuple((hidden[index], weight) for hidden, weight in self.projection.pairs)
        return replace(self.projection, pairs=pairs)

    def logprobs(self, batch: Batch) -> Tensor:
        """log p(y_t | s_t) of this model at every action token of the batch, [B, T]."""
        at = batch.action_mask_BT[:, 1:].nonzero(as_tuple=True)
        flat = score_rows(self.take(at), batch.tokens_BT[:, 1:][at])
        return _grid(flat["logprobs"], at, batch)


@dataclass(frozen=True)
class Whole:
    """Of losses of whole sequences or groups: what the head's value lacks, and {"term.name": one value each}."""

    correction: Tensor
    monitors: dict[str, Tensor]


class Learner(nn.Module):
    """`forward(batch, denominators)` gives the micro-batch's share of the step's loss, and per-token monitors.

    Other modes, under no_grad: "stats", "dense" (the model's `Dense`), "reference" (that of the model without its adapter).
    """

    def __init__(self, model: Any, terms: Sequence[Term], *, head_dtype: torch.dtype | None = None):
        super().__init__()
        self.model = model
        self.terms = list(terms)
        self.head_dtype = head_dtype
        self.head: Head | None = split_head(model)
        self.monitor_entropy = any(t.weight is not None for t in terms)

    def forward(self, batch: Batch, denominators: Sequence[float] | None = None, mode: str = "loss") -> Any:
        if mode == "loss":
            assert denominators is not None
            return self._loss(batch, denominators)
        adapter_off = (
            self.model.disable_adapter()
            if mode == "reference" and hasattr(self.model, "disable_adapter")
            else nullcontext()
        )
        with torch.no_grad(), adapter_off:
            if mode in ("reference", "dense"):
                everywhere = torch.ones_like(batch.action_mask_BT).nonzero(as_tuple=True)
                return Dense(self._project(batch, everywhere), batch.tokens_BT.shape[1])
            return self._stats(batch, (batch.position_BT > 0) & (batch.sequence_BT >= 0))

    def _project(self, batch: Batch, at: tuple[Tensor, ...]) -> Projection | FullLogits:
        """Projection of the hidden states at `at`, at the batch's temperature; they predict the next column."""
        inputs = model_inputs(batch)
        if self.head is None:
            return FullLogits(self.model(**inputs, use_cache=False).logits[at], batch.temperature)
        hidden = backbone(self.model)(**inputs, use_cache=False).last_hidden_state
        return replace(self.head.project(hidden[at]), temperature=batch.temperature)

    def _stats(self, batch: Batch, mask_BT: Tensor, *, entropy: bool = True) -> TokenStats:
        at = mask_BT[:, 1:].nonzero(as_tuple=True)
        needs = ("logprobs", "entropy") if entropy else ("logprobs",)
        flat = score_rows(self._project(batch, at), batch.tokens_BT[:, 1:][at], needs, dtype=self.head_dtype)
        grids = {name: _grid(value, at, batch) for name, value in flat.items()}
        return TokenStats(grids["logprobs"], grids.get("entropy"))

    def _loss(self, batch: Batch, denominators: Sequence[float]) -> dict[str, Any]:
        factor_BT = [factors(t, batch, d) for t, d in zip(self.terms, denominators, strict=True)]
        used_BT = torch.stack([f != 0 for f in factor_BT]).any(0)
        at = used_BT[:, 1:].nonzero(as_tuple=True)
        projection = self._project(batch, at)
        with torch.autocast(batch.tokens_BT.device.type, enabled=False):
            rows, whole = self._rows(batch, factor_BT, used_BT, at, projection)
            loss, monitors = objective_sum(
                projection, rows, self.terms, dtype=self.head_dtype, with_entropy=self.monitor_entropy
            )
        if whole is not None:
            loss = loss + whole.correction
        masks = {str(i): (f[:, 1:][at] != 0) for i, f in enumerate(factor_BT)}
        splits = {"author": batch.author_BT[:, 1:][at]}
        if "part" in batch.columns:
            splits["part"] = batch.columns["part"][:, 1:][at]
        return {
            "loss": loss,
            "monitors": monitors,
            "masks": masks,
            "splits": splits,
            "whole": {} if whole is None else whole.monitors,
            "log_ratio": _log_ratio(monitors, batch, at),
        }

    def _rows(
        self, batch: Batch, factor_BT: list[Tensor], used_BT: Tensor, at: tuple[Tensor, ...], projection: Any
    ) -> tuple[Rows, Whole | None]:
        flat = replace(batch, dense={}).map_tensors(lambda x: x[:, 1:][at][None])
        dense = {name: source.take(at) for name, source in batch.dense.items()}
        by_term = {i: f[:, 1:][at] for i, f in enumerate(factor_BT) if self.terms[i].loss.scope == "token"}
        rows = Rows(batch.tokens_BT[:, 1:][at], flat, by_term, dense=dense)
        if not any(t.two_pass for t in self.terms):
            return rows, None
        return self._second_look(batch, factor_BT, at, projection, rows)

    def _second_look(
        self, batch: Batch, factor_BT: list[Tensor], at: tuple[Tensor, ...], projection: Any, rows: Rows
    ) -> tuple[Rows, Whole]:
        """Statistics of the whole micro-batch first, then coefficients and weights of the terms that need them."""
        needs = ("logprobs", "entropy") if any("entropy" in t.needs for t in self.terms) else ("logprobs",)
        flat = score_rows(_detached(projection), rows.targets_N, needs, dtype=self.head_dtype)
        grids = {name: _grid(value, at, batch) for name, value in flat.items()}
        logprobs = grids["logprobs"].requires_grad_()
        stats = TokenStats(logprobs, grids.get("entropy"))
        weights: dict[int, Tensor] = {}
        monitors: dict[str, Tensor] = {}
        total = torch.zeros((), device=logprobs.device)
        for index, term in enumerate(self.terms):
            seen = replace(batch, action_mask_BT=factor_BT[index] != 0)
            if term.weight is not None and term.weight.scope == "sequence":
                with torch.no_grad():
                    weights[index] = term.weight(stats.detach(), seen)[:, 1:][at]
            if term.loss.scope in WHOLE:
                factor = whole_factors(term, batch, factor_BT[index])
                with torch.enable_grad():
                    value = term.loss(stats, seen)
                    total = total + (value.where(factor != 0, 0.0) * factor).sum()
                noted = {f"{term.loss.scope}_loss": value.detach(), **term.loss.monitor(stats.detach(), seen)}
                monitors |= {f"{index}.{name}": v[factor != 0] for name, v in noted.items()}
        if not total.requires_grad:
            return replace(rows, weights=weights), Whole(total, monitors)
        grad_BT = torch.autograd.grad(total, logprobs)[0]
        coefficients = grad_BT[:, 1:][at].detach()
        # The head adds sum c log p, whose gradient is right and whose value is not: put the loss's own value there.
        correction = total.detach() - (coefficients * flat["logprobs"]).sum()
        return replace(rows, weights=weights, coefficients=coefficients), Whole(correction, monitors)


def _log_ratio(monitors: dict[str, Tensor], batch: Batch, at: tuple[Tensor, ...]) -> Tensor | None:
    """log pi - behavior_logprobs [N] of the tokens at `at`, where the batch says what the sampler had."""
    if "logprobs" not in monitors or "behavior_logprobs" not in batch.columns:
        return None
    gap = monitors["logprobs"] - batch.columns["behavior_logprobs"][:, 1:][at]
    return gap[~gap.isnan()]  # tokens of a mixture that no sampler wrote


def _grid(values_N: Tensor, at: tuple[Tensor, ...], batch: Batch) -> Tensor:
    """Values of the tokens at `at` (columns counted from 1) as [B, T], 0 elsewhere."""
    grid = torch.zeros(batch.tokens_BT.shape, dtype=values_N.dtype, device=values_N.device)
    grid[at[0], at[1] + 1] = values_N
    return grid


def _detached(projection: Projection | FullLogits) -> Projection | FullLogits:
    if isinstance(projection, FullLogits):
        return replace(projection, full=projection.full.detach())
    return replace(projection, pairs=tuple((h.detach(), w.detach()) for h, w in projection.pairs))
