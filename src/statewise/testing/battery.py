"""Checks that any component must pass, each against the real learner in float64 and against plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from statewise.component import CAPABILITIES, Component, Loss, Selector, Weight, parse
from statewise.errors import told
from statewise.objective import WHOLE, Reduction, Term, denominators, factors, whole_factors
from statewise.testing.fixtures import is_dense, rollouts, sample_settings, tiny_learner, with_dense
from statewise.training.packing import micro_batches
from statewise.types import Batch, Rollout, TokenStats

TOLERANCE = 1e-9  # relative to the largest entry; float64 sums in another order differ by about 1e-15
FACTOR_TOLERANCE = 1e-6  # where float32 factors or columns take part
REDUCTIONS: tuple[Reduction, ...] = ("token_mean", "sequence_mean", "sequence_mean_token_mean", "fixed_length")


@dataclass(frozen=True)
class Check:
    """One result; `detail` says what was received and what was expected."""

    name: str
    passed: bool
    detail: str = ""


class _Failed(Exception):
    """A check said no."""


def battery(component: Component | type[Component]) -> list[Check]:
    """All checks that apply to the component (a class is instantiated with its defaults).

    Loss, weight: round_trip, declarations, partition, packing, permutation, masked, one_pass, extreme_logits for each
    reduction that applies; weight also: weight_values; a loss with `is_divergence`: equality; selector: selector.
    A check that raises is a failed check.
    """
    try:
        one: Component = sample_settings(component) if isinstance(component, type) else component
    except Exception as error:
        return [Check("construct", False, str(error))]
    return [_run(name, check) for name, check in _checks(one)]


def _run(name: str, check: Callable[[], None]) -> Check:
    try:
        check()
    except _Failed as failure:
        return Check(name, False, str(failure))
    except Exception as error:
        return Check(name, False, f"raised {told(error)}")
    return Check(name, True)


def _checks(component: Component) -> Iterator[tuple[str, Callable[[], None]]]:
    yield "round_trip", lambda: _round_trip(component)
    if isinstance(component, Selector):
        yield "selector", lambda: _selector(component)
        yield "partition", lambda: _partition(_Case(Term(loss=_nll(), on=component)))
    if isinstance(component, Weight):
        yield "weight_values", lambda: _weight_values(component)
    if isinstance(component, Loss | Weight):
        yield "declarations", lambda: _declarations(component)
        for reduce in _reductions(component):
            case = _Case(_term(component, reduce))
            for check in (_partition, _packing, _permutation, _masked, _one_pass, _extreme_logits):
                yield f"{check.__name__[1:]}[{reduce}]", lambda check=check, case=case: check(case)  # type: ignore[misc]
    if isinstance(component, Loss) and component.is_divergence:
        yield "equality", lambda: _equality(component)


def _nll() -> Loss:
    return parse("loss", "nll", "loss")  # type: ignore[return-value]


def _reductions(component: Loss | Weight) -> Sequence[str]:
    whole = isinstance(component, Loss) and component.scope in WHOLE
    return (WHOLE[component.scope],) if whole else REDUCTIONS


def _term(component: Loss | Weight, reduce: str) -> Term:
    length = 8 if reduce == "fixed_length" else None
    parts = {"loss": component} if isinstance(component, Loss) else {"loss": _nll(), "weight": component}
    return Term(**parts, reduce=reduce, length=length, coef=0.7)


class _Case:
    """One term on one set of rollouts: its loss and gradients for any split, order or change of the data."""

    def __init__(self, term: Term):
        self.term = term
        reads = frozenset(name for part in term.parts for name in part.columns_read()) - CAPABILITIES
        self.dense = {name for name in reads if is_dense(name)}
        self.rollouts = rollouts(reads - self.dense)

    def batches(self, given: list[Rollout] | None = None, **how: Any) -> list[Batch]:
        keep_groups = self.term.loss.scope == "group"
        batches = micro_batches(self.rollouts if given is None else given, pad_id=0, keep_groups=keep_groups, **how)
        return [with_dense(replace(b, progress=0.5), self.dense) for b in batches]

    def evaluate(self, batches: list[Batch], *, logit_scale: float = 1.0) -> tuple[float, Tensor]:
        """Loss, and the gradient of all parameters as one vector."""
        learner = tiny_learner([self.term], logit_scale=logit_scale)
        shares = denominators([self.term], batches)
        total = 0.0
        for batch in batches:
            loss = learner(batch, shares)["loss"]
            loss.backward()
            total += float(loss.detach())
        return total, _gradient(learner.model)


def _gradient(model: Any) -> Tensor:
    return torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in model.parameters()])


def _same(got: tuple[float, Tensor], expected: tuple[float, Tensor], what: str, tolerance: float = TOLERANCE) -> None:
    for name, a, b in (("loss", torch.tensor(got[0]), torch.tensor(expected[0])), ("gradient", got[1], expected[1])):
        gap = float((a - b).abs().max())
        limit = tolerance * max(1.0, float(b.abs().max()))
        if not gap <= limit:
            raise _Failed(f"{name} changes by {gap:.3g} {what} (allowed: {limit:.3g})")


def _round_trip(component: Component) -> None:
    again = parse(component.role, component.to_plain(), component.kind)
    if again != component:
        raise _Failed(f"{component.to_plain()} loads as {again!r}, expected {component!r}")


def _partition(case: _Case) -> None:
    whole = case.evaluate(case.batches())
    for rows in (1, 2, 4):
        _same(case.evaluate(case.batches(max_rows=rows)), whole, f"when micro-batches hold {rows} row(s)")


def _packing(case: _Case) -> None:
    _same(case.evaluate(case.batches(pack_length=24)), case.evaluate(case.batches()), "when sequences are packed")


def _permutation(case: _Case) -> None:
    _same(case.evaluate(case.batches(case.rollouts[::-1])), case.evaluate(case.batches()), "when rows are reordered")


def _masked(case: _Case) -> None:
    """NaN in every column where nothing is trained must not be seen."""
    whole = case.evaluate(case.batches())
    poisoned = []
    for batch in case.batches():
        hidden = ~batch.action_mask_BT
        columns = {name: value.masked_fill(hidden, float("nan")) for name, value in batch.columns.items()}
        poisoned.append(replace(batch, columns=columns))
    _same(case.evaluate(poisoned), whole, "when columns are NaN at masked positions")


def _extreme_logits(case: _Case) -> None:
    loss, gradient = case.evaluate(case.batches(), logit_scale=1e4)
    if not (torch.isfinite(gradient).all() and torch.isfinite(torch.tensor(loss))):
        raise _Failed(
            f"loss {loss}, gradient with {int((~torch.isfinite(gradient)).sum())} non-finite entries at logits of 1e4"
        )


def _one_pass(case: _Case) -> None:
    """The one-pass head equals autograd through the model's own full logits."""
    batches = case.batches()
    _same(case.evaluate(batches), _plain_autograd(case.term, batches), "from plain autograd", FACTOR_TOLERANCE)


def _plain_autograd(term: Term, batches: list[Batch]) -> tuple[float, Tensor]:
    """The term computed the obvious way, on stored logits, with the weight as a constant."""
    learner = tiny_learner([term])
    shares = denominators([term], batches)
    total = 0.0
    for batch in batches:
        inputs = {"input_ids": batch.tokens_BT, "attention_mask": (batch.sequence_BT >= 0).long()}
        logits = learner.model(**inputs, use_cache=False).logits
        stats = full_stats(torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1), batch.tokens_BT)
        seen = replace(batch, dense={n: _shifted(d.projection, batch) for n, d in batch.dense.items()})
        factor = factors(term, batch, shares[0])
        value = term.loss(stats, seen)
        if term.loss.scope in WHOLE:
            loss = (value * whole_factors(term, batch, factor)).sum()
        else:
            if term.weight is not None:
                value = value * term.weight(stats.detach(), seen).detach()
            loss = (value.where(factor != 0, 0.0) * factor).sum()
        loss.backward()
        total += float(loss.detach())
    return total, _gradient(learner.model)


def _shifted(projection: Any, batch: Batch) -> Tensor:
    logits = projection.logits(slice(None)).view(*batch.tokens_BT.shape, -1)
    return torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1)


def full_stats(logits_BTV: Tensor, tokens_BT: Tensor) -> TokenStats:
    """Statistics straight from stored logits, where column t of the logits speaks of token t."""
    log_p = logits_BTV.log_softmax(-1)
    logprobs = log_p.gather(-1, tokens_BT[..., None])[..., 0]
    return TokenStats(logprobs, -(log_p.exp() * log_p).sum(-1), logits_BTV)


def _equality(loss: Loss) -> None:
    """A divergence from the policy to itself is 0 with zero gradient."""
    case = _Case(Term(loss=loss))
    batches = [with_dense(b, case.dense, seed=0) for b in micro_batches(case.rollouts, pad_id=0)]
    value, gradient = case.evaluate(batches)
    if abs(value) > TOLERANCE or float(gradient.abs().max()) > TOLERANCE:
        raise _Failed(
            f"at equality the loss is {value:.3g} and the largest gradient {float(gradient.abs().max()):.3g}, expected 0"
        )


def _selector(selector: Selector) -> None:
    case = _Case(Term(loss=_nll(), on=selector))
    for batch in case.batches():
        got = selector(batch)
        if got.shape != batch.tokens_BT.shape:
            raise _Failed(f"shape {tuple(got.shape)}, expected {tuple(batch.tokens_BT.shape)}")
        if bool((got[~batch.action_mask_BT] != 0).any()):
            raise _Failed("selects tokens outside the action mask")
        if not torch.equal(got, selector(batch)):
            raise _Failed("two calls on the same batch differ")


def _weight_values(weight: Weight) -> None:
    case = _Case(Term(loss=_nll(), weight=weight))
    for batch in case.batches():
        seen = replace(batch, dense={n: _shifted(d.projection, batch) for n, d in batch.dense.items()})
        logits = torch.randn(
            *batch.tokens_BT.shape, 29, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        values = weight(full_stats(logits, batch.tokens_BT), seen)
        if values.shape != batch.tokens_BT.shape:
            raise _Failed(f"shape {tuple(values.shape)}, expected {tuple(batch.tokens_BT.shape)}")
        inside = values[batch.action_mask_BT]
        if not bool((torch.isfinite(inside) & (inside >= 0)).all()):
            raise _Failed(
                f"values from {float(inside.min()):.3g} to {float(inside.max()):.3g}, expected finite ones >= 0"
            )


class _Seen(Mapping[str, Any]):
    """A mapping that notes which names were asked for."""

    def __init__(self, inner: Mapping[str, Any], used: set[str]):
        self.inner, self.used = inner, used

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return self.inner[name]

    def __contains__(self, name: object) -> bool:
        return name in self.inner

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class _SeenStats:
    """TokenStats that notes which fields were used; phi uses two."""

    def __init__(self, stats: TokenStats, used: set[str]):
        self._stats, self._used = stats, used

    def __getattr__(self, name: str) -> Any:
        self._used |= {"logprobs", "entropy"} if name == "phi" else {name}
        return getattr(self._stats, name)


def _declarations(component: Loss | Weight) -> None:
    """`needs` and `reads` name exactly what is used."""
    case = _Case(_term(component, _reductions(component)[-1]))
    used_stats: set[str] = set()
    used_columns: set[str] = set()
    for batch in case.batches():
        logits = torch.randn(
            *batch.tokens_BT.shape, 29, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        dense = {n: _shifted(d.projection, batch) for n, d in batch.dense.items()}
        seen = replace(batch, columns=_Seen(batch.columns, used_columns), dense=_Seen(dense, used_columns))
        component(_SeenStats(full_stats(logits, batch.tokens_BT), used_stats), seen)  # type: ignore[arg-type]
    declared = component.columns_read() - CAPABILITIES
    for what, have, want in (("needs", set(component.needs), used_stats), ("reads", set(declared), used_columns)):
        if have != want:
            raise _Failed(f"{what} declares {sorted(have)}, and the call uses {sorted(want)}")
