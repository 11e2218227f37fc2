"""The one-pass head: statistics, weights, loss and gradient a chunk of tokens at a time; logits are never stored.

For a loss of the statistics alone (nll, every weight, policy gradients) the gradient on the chunk's logits is written in
closed form, with g = dL/dlog p(y) and k = dL/dH:

    dL/dz = g (e_y - p) - k p (log p + H)

and for any loss that reads the logits autograd runs inside the chunk. Either way a chunk costs three matrix products:
logits, gradient of the hidden rows, gradient of the head (left out when the head is frozen).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from statewise.models.head import FullLogits, Projection
from statewise.objective import Term
from statewise.types import Batch, TokenStats

# Float32 logits a chunk. On a CPU a step's peak memory is the limit (96 MiB is 10 % faster and 5 % larger); a GPU's kernels
# need more rows to be busy.
CHUNK_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
MIN_ROWS, MAX_ROWS = 128, 8192


@dataclass(frozen=True)
class Rows:
    """The N tokens of a micro-batch that some term is about, as one-row tensors.

    targets_N     y_t                      factors   {term index: f_t [N]}, the loss is sum_t f_t w_t l_t
    batch         columns as [1, N]        weights   {term index: [N]} where a whole sequence decided them
    coefficients  dL/dlog p(y_t) [N] from losses of whole sequences
    """

    targets_N: Tensor
    batch: Batch
    factors: Mapping[int, Tensor]
    weights: Mapping[int, Tensor] = field(default_factory=dict)
    coefficients: Tensor | None = None
    dense: Mapping[str, Any] = field(default_factory=dict)


def chunk_rows(num_tokens: int, device: torch.device) -> int:
    """Tokens a chunk for a vocabulary of `num_tokens`."""
    size = CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"])
    return max(MIN_ROWS, min(MAX_ROWS, size // (4 * num_tokens)))


def statistics(logits_NV: Tensor, targets_N: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """log p(y), H (nats), and what the gradient needs: e = exp(z - max) [N, V] and its sum s [N].

    H = ln s - t / s with t = sum e (z - max); logits_NV is overwritten by z - max.
    """
    shifted = logits_NV.sub_(logits_NV.amax(-1, keepdim=True))
    exps = shifted.exp()
    total = exps.sum(-1)
    log_total = total.log()
    logprobs = shifted.gather(-1, targets_N[:, None])[:, 0] - log_total
    if not entropy:
        return logprobs, None, exps, total
    # A masked id has z = -inf and e = 0, and 0 * -inf is NaN; such an id adds nothing to the entropy.
    mean = torch.linalg.vecdot(exps, shifted.clamp_min_(-1e30))
    return logprobs, (log_total - mean / total).clamp_min(0), exps, total


class _OnePass(torch.autograd.Function):
    """Runs the chunks in forward, keeps the finished gradients, hands them on in backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[bool], tuple[Tensor, list[Tensor | None]]], *leaves: Tensor) -> Tensor:
        wants = any(ctx.needs_input_grad[1:])
        loss, grads = run(wants)
        ctx.grads = grads
        return loss

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        grads = [None if g is None else g * grad_out.to(g.dtype) for g in ctx.grads]
        ctx.grads = None
        return (None, *grads)


def objective_sum(
    projection: Projection | FullLogits,
    rows: Rows,
    terms: Sequence[Term],
    *,
    dtype: torch.dtype | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """sum over terms and tokens of f_t w_t l_t (a differentiable scalar, float32), and per-token monitors {name: [N]}.

    Monitors hold `logprobs`, `entropy` where computed, and for every term its `value`, `weight` and weight monitors.
    """
    chunks = _Chunks(projection, rows, terms, dtype, with_entropy)
    leaves = _leaves(projection)
    loss = _OnePass.apply(chunks.run, *leaves)
    return loss, chunks.monitors


def _leaves(projection: Projection | FullLogits) -> list[Tensor]:
    if isinstance(projection, FullLogits):
        return [projection.full]
    bias = [] if projection.bias is None else [projection.bias]
    return [t for pair in projection.pairs for t in pair] + bias


class _Chunks:
    def __init__(
        self, projection: Projection | FullLogits, rows: Rows, terms: Sequence[Term], dtype: Any, with_entropy: bool
    ):
        self.projection, self.rows, self.terms, self.dtype = projection, rows, terms, dtype
        needs = {n for term in terms for n in term.needs}
        self.entropy = with_entropy or "entropy" in needs
        self.weights_need_logits = any(t.weight is not None and "logits" in t.weight.needs for t in terms)
        self.by_logits = [i for i, t in enumerate(terms) if t.loss.scope == "token" and "logits" in t.loss.needs]
        self.by_stats = [i for i, t in enumerate(terms) if t.loss.scope == "token" and "logits" not in t.loss.needs]
        self.monitors: dict[str, Tensor] = {}
        self._parts: dict[str, list[Tensor]] = {}

    def run(self, wants_grad: bool) -> tuple[Tensor, list[Tensor | None]]:
        leaves = _leaves(self.projection)
        grads = [
            torch.zeros(t.shape, dtype=_wide(t), device=t.device) if wants_grad and t.requires_grad else None
            for t in leaves
        ]
        # Zero-size sums keep a rank without tokens in the graph.
        loss = torch.zeros((), dtype=_wide(leaves[0]), device=leaves[0].device)
        size, count = chunk_rows(self.projection.num_tokens, self.projection.device), self.projection.num_rows
        for start in range(0, count, size):
            part = slice(start, min(start + size, count))
            value, dlogits = self._chunk(part, wants_grad)
            loss += value
            if dlogits is not None:
                self._pull_back(part, dlogits, leaves, grads)
        self.monitors = {name: torch.cat(values) for name, values in self._parts.items()}
        return loss, [None if g is None else g.to(t.dtype) for g, t in zip(grads, leaves, strict=True)]

    def _chunk(self, part: slice, wants_grad: bool) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad():
            raw = self.projection.logits(part, self.dtype)
        keep = bool(self.by_logits) or self.weights_need_logits
        batch = self._batch(part)
        logits = raw if not keep else raw.clone()
        logprobs, entropy, exps, total = statistics(logits, self.rows.targets_N[part], entropy=self.entropy)
        stats = TokenStats(logprobs[None], None if entropy is None else entropy[None], raw[None] if keep else None)
        self._note({"logprobs": logprobs, **({} if entropy is None else {"entropy": entropy})})
        weights = {i: self._weight(i, stats, batch, part) for i in [*self.by_stats, *self.by_logits]}
        value, g, k = self._by_stats(stats, batch, weights, part)
        extra = None
        if self.by_logits:
            more, extra = self._by_logits(stats, batch, weights, part, wants_grad)
            value = value + more
        if not wants_grad:
            return value, None
        dlogits = _closed_form(g, k, logits, exps, total, entropy, self.rows.targets_N[part])
        if extra is not None:
            dlogits += extra
        return value, self._through_head(dlogits, raw if keep else None, part)

    def _batch(self, part: slice) -> Batch:
        batch = self.rows.batch.map_tensors(lambda x: x[:, part])
        dense = {name: source.logits(part)[None] for name, source in self.rows.dense.items()}
        return replace(batch, dense=dense)

    def _weight(self, index: int, stats: TokenStats, batch: Batch, part: slice) -> Tensor | None:
        """w [n], detached and under no_grad; None for an unweighted term."""
        weight = self.terms[index].weight
        if weight is None:
            return None
        if index in self.rows.weights:
            value = self.rows.weights[index][part]
        else:
            clean = _clean(batch, self.rows.factors[index][part] != 0)
            with torch.no_grad():
                value = weight(stats.detach(), clean)[0].detach()
                for name, seen in weight.monitor(stats.detach(), clean).items():
                    self._note({f"{index}.{name}": seen[0]})
        self._note({f"{index}.weight": value})
        return value

    def _by_stats(
        self, stats: TokenStats, batch: Batch, weights: Mapping[int, Tensor | None], part: slice
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Value, dL/dlog p(y) [n] and dL/dH [n] (None where no loss depends on the entropy)."""
        logprobs = stats.logprobs.detach().requires_grad_()
        entropy = None if stats.entropy is None else stats.entropy.detach().requires_grad_()
        with torch.enable_grad():
            value = (logprobs * 0.0).sum()
            for index in self.by_stats:
                inner = TokenStats(logprobs, entropy, None)
                value = value + self._term(index, inner, batch, weights[index], part)
            if self.rows.coefficients is not None:
                value = value + (logprobs[0] * self.rows.coefficients[part]).sum()
            sources = [logprobs] if entropy is None else [logprobs, entropy]
            grads = torch.autograd.grad(value, sources, allow_unused=True)
        g = grads[0][0]
        k = grads[1][0] if entropy is not None and grads[1] is not None else None
        return value.detach(), g, k

    def _by_logits(
        self, stats: TokenStats, batch: Batch, weights: Mapping[int, Tensor | None], part: slice, wants_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        assert stats.logits is not None
        logits = stats.logits.detach().requires_grad_(wants_grad)
        with torch.set_grad_enabled(wants_grad):
            log_p = logits.log_softmax(-1)
            logprobs = log_p.gather(-1, self.rows.targets_N[part][None, :, None])[..., 0]
            entropy = None if stats.entropy is None else -(log_p.exp() * log_p).sum(-1)
            inner = TokenStats(logprobs, entropy, logits)
            value = sum((self._term(i, inner, batch, weights[i], part) for i in self.by_logits), logits.sum() * 0.0)
            grad = torch.autograd.grad(value, logits)[0][0] if wants_grad else None
        return value.detach(), grad

    def _term(self, index: int, stats: TokenStats, batch: Batch, weight: Tensor | None, part: slice) -> Tensor:
        """sum_t f_t w_t l_t of one term over the chunk."""
        factor = self.rows.factors[index][part]
        inside = factor != 0
        loss, clean = self.terms[index].loss, _clean(batch, inside)
        value = loss(stats, clean)[0]
        with torch.no_grad():
            seen = loss.monitor(stats.detach(), clean)
        self._note({f"{index}.value": value.detach(), **{f"{index}.{name}": v[0] for name, v in seen.items()}})
        scale = factor if weight is None else factor * weight.where(inside, 0.0)
        return (value.where(inside, 0.0) * scale).sum()

    def _through_head(self, dlogits: Tensor, logits: Tensor | None, part: slice) -> Tensor:
        """The gradient before temperature, cap and scale, from that on the `logits` (made again where not at hand)."""
        temperature = self.projection.temperature
        if temperature != 1.0:
            dlogits = dlogits / temperature
        if isinstance(self.projection, FullLogits):
            return dlogits
        cap, scale = self.projection.softcap, self.projection.scale
        if cap is not None:
            if logits is None:
                logits = self.projection.logits(part, self.dtype)
            dlogits = dlogits * (1 - (logits * (temperature / cap)) ** 2)
        return dlogits if scale == 1.0 else dlogits * scale

    def _pull_back(self, part: slice, dlogits: Tensor, leaves: list[Tensor], grads: list[Tensor | None]) -> None:
        if isinstance(self.projection, FullLogits):
            if grads[0] is not None:
                grads[0][part] = dlogits
            return
        for i, (hidden, weight) in enumerate(self.projection.pairs):
            kind = self.dtype or weight.dtype
            slopes = dlogits.to(kind)
            into_hidden, into_weight = grads[2 * i], grads[2 * i + 1]
            if into_hidden is not None:
                into_hidden[part] = (slopes @ weight.to(kind)).to(into_hidden.dtype)
            if into_weight is not None:
                _accumulate(into_weight, slopes, hidden[part].to(kind))
        if self.projection.bias is not None and grads[-1] is not None:
            grads[-1] += dlogits.sum(0)

    def _note(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._parts.setdefault(name, []).append(value.detach())


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _accumulate(into: Tensor, slopes: Tensor, hidden: Tensor) -> None:
    if into.dtype == slopes.dtype:
        into.addmm_(slopes.T, hidden)
    else:
        into += slopes.T @ hidden


def _clean(batch: Batch, inside: Tensor) -> Batch:
    """Columns with 0 where the term does not look, so that a NaN there reaches neither value nor gradient."""
    if not batch.columns:
        return batch
    return replace(batch, columns={name: value.where(inside[None], 0.0) for name, value in batch.columns.items()})


def _closed_form(
    g: Tensor, k: Tensor | None, shifted: Tensor, exps: Tensor, total: Tensor, entropy: Tensor | None, targets: Tensor
) -> Tensor:
    """g (e_y - p) - k p (log p + H) on [n, V], written over `exps`."""
    if k is None:
        dlogits = exps.mul_((-g / total)[:, None])
    else:
        assert entropy is not None
        log_total = total.log()
        slope = shifted.clamp_min_(-1e30).mul_(-k[:, None]).add_((-g - k * (entropy - log_total))[:, None])
        dlogits = exps.mul_(slope).div_(total[:, None])
    dlogits.scatter_add_(-1, targets[:, None], g[:, None])
    return dlogits
