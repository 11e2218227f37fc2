"""The objective: a list of terms, each coef x reduce(loss x weight, over selected tokens), with global denominators.

Every reduction is sum_t f_t l_t with factors f_t known before the forward pass, so any split of a batch into
micro-batches or over ranks gives the same loss and gradient:

    token_mean                 f = 1 / (number of selected tokens)             DAPO, TRL "nll"; verl token-mean
    sequence_mean              f = 1 / (number of sequences)                   verl seq-mean-token-sum
    sequence_mean_token_mean   f = 1 / (number of sequences x tokens in it)    GRPO; verl seq-mean-token-mean
    fixed_length               f = 1 / (number of sequences x length)          Dr. GRPO
    group_mean                 f = 1 / (number of groups)                      DPO: the mean over pairs

A selector's multiplier (compensation) scales the loss but not the count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator, model_validator

from statewise.component import Component, Loss, Selector, Weight, parse
from statewise.errors import RecipeError
from statewise.selectors import Actions

if TYPE_CHECKING:
    from torch import Tensor

    from statewise.types import Batch

Reduction = Literal["token_mean", "sequence_mean", "sequence_mean_token_mean", "fixed_length", "group_mean"]
REDUCTION_WORDS: dict[str, str] = {
    "token_mean": "sum over selected tokens / number of selected tokens in the step",
    "sequence_mean": "sum over selected tokens / number of sequences in the step",
    "sequence_mean_token_mean": "mean over sequences of the mean over each sequence's selected tokens",
    "fixed_length": "sum over selected tokens / (number of sequences x fixed length)",
    "group_mean": "sum over groups / number of groups in the step",
}
# What a loss of whole sequences or groups is averaged over.
WHOLE: dict[str, str] = {"sequence": "sequence_mean", "group": "group_mean"}


class Term(BaseModel):
    """coef x reduce(loss x weight on selected tokens)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    loss: Loss
    weight: Weight | None = None
    on: Selector = Actions()
    reduce: Reduction = "token_mean"
    coef: float = Field(1.0, allow_inf_nan=False)
    length: int | None = Field(None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _of_the_loss(cls, value: Any) -> Any:
        """Where no reduction is named, a loss of whole sequences or groups has the one that it takes."""
        if not isinstance(value, dict) or "reduce" in value or "loss" not in value:
            return value
        loss: Any = parse("loss", value["loss"], "objective.loss")
        return {**value, "loss": loss, "reduce": WHOLE[loss.scope]} if loss.scope in WHOLE else value

    @field_validator("loss", "weight", "on", mode="before")
    @classmethod
    def _component(cls, value: Any, info: Any) -> Any:
        role = {"loss": "loss", "weight": "weight", "on": "selector"}[info.field_name]
        return None if value is None else parse(role, value, f"objective.{info.field_name}")

    @field_serializer("loss", "weight", "on")
    def _plain(self, value: Component | None) -> Any:
        return None if value is None else value.to_plain()

    @model_validator(mode="after")
    def _consistent(self) -> Term:
        if (self.reduce == "fixed_length") != (self.length is not None):
            raise RecipeError("objective: `length` belongs to reduce = 'fixed_length', which needs it.")
        scope = self.loss.scope
        if scope in WHOLE and (self.reduce != WHOLE[scope] or self.weight is not None):
            raise RecipeError(
                f"objective: '{self.loss.kind}' is a loss of whole {scope}s; it takes reduce = '{WHOLE[scope]}' "
                f"and no weight (received reduce = '{self.reduce}', weight = {self.weight and self.weight.kind})."
            )
        if self.reduce == "group_mean" and scope != "group":
            raise RecipeError(
                f"objective: reduce = 'group_mean' is for losses that compare the rollouts of a group, such as 'dpo'; "
                f"'{self.loss.kind}' has a value a {scope}. Take reduce = 'sequence_mean'."
            )
        return self

    @property
    def parts(self) -> list[Component]:
        return [p for p in (self.loss, self.weight, self.on) if p is not None]

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(n for p in self.parts for n in p.needs)

    @property
    def two_pass(self) -> bool:
        """Whether a whole sequence must be seen before a token's coefficient is known."""
        return self.loss.scope != "token" or (self.weight is not None and self.weight.scope != "token")

    def words(self) -> str:
        """The term as a formula in words, normalisation included."""
        loss = self.loss.words or self.loss.describe()
        weight = f" x stop_grad[{self.weight.words or self.weight.describe()}]" if self.weight else ""
        where = "" if isinstance(self.on, Actions) else f" on {self.on.describe()}"
        return f"{self.coef:g} x [{loss}{weight}]{where}; {REDUCTION_WORDS[self.reduce]}"

    def name(self) -> str:
        return self.loss.kind if self.weight is None else f"{self.loss.kind}_{self.weight.kind}"


def per_sequence(values_BT: Tensor, batch: Batch, mask_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sum and number of the masked (default: action) tokens of every sequence, each [S]."""
    import torch

    mask = batch.action_mask_BT if mask_BT is None else mask_BT
    index = batch.sequence_BT[mask]
    zeros = torch.zeros(batch.num_sequences, dtype=values_BT.dtype, device=values_BT.device)
    total = zeros.index_add(0, index, values_BT[mask])
    count = zeros.index_add(0, index, torch.ones_like(values_BT[mask]))
    return total, count


def per_group(values_S: Tensor, batch: Batch) -> Tensor:
    """Sum over the sequences of every group in the batch, [G], groups in the order of their numbers."""
    groups, index = batch.group_S.unique(return_inverse=True)
    return values_S.new_zeros(len(groups)).index_add(0, index, values_S)


def spread(values_S: Tensor, batch: Batch) -> Tensor:
    """Each sequence's value at all its tokens, [B, T]; 0 on padding."""
    inside = batch.sequence_BT >= 0
    return values_S[batch.sequence_BT.clamp_min(0)] * inside


def counts(term: Term, batch: Batch, selected_BT: Tensor | None = None) -> float:
    """This batch's share of the term's denominator."""
    selected = term.on(batch) if selected_BT is None else selected_BT
    if term.reduce == "token_mean":
        return float((selected != 0).sum())
    _, tokens_S = per_sequence(selected, batch, (selected != 0) & batch.action_mask_BT)
    if term.reduce == "group_mean":
        return float((per_group(tokens_S, batch) > 0).sum())
    sequences = float((tokens_S > 0).sum())
    return sequences * term.length if term.length is not None else sequences


def denominators(terms: Sequence[Term], batches: Sequence[Batch]) -> list[float]:
    """Per term, over all micro-batches of this rank; sum them over ranks, before the first backward."""
    return [sum(counts(term, batch) for batch in batches) for term in terms]


def whole_factors(term: Term, batch: Batch, factor_BT: Tensor) -> Tensor:
    """The factor of every sequence, [S], or group, [G], of a loss with that scope; 0 where nothing of it is selected."""
    total, count = per_sequence(factor_BT, batch, factor_BT != 0)
    if term.loss.scope == "group":
        total, count = per_group(total, batch), per_group(count, batch)
    return total / count.clamp_min(1)


def factors(term: Term, batch: Batch, denominator: float) -> Tensor:
    """f_t [B, T] such that the term's loss over the whole step is sum_t f_t l_t."""
    selected = term.on(batch)
    if denominator == 0:
        return selected * 0
    scale = term.coef / denominator
    if term.reduce == "sequence_mean_token_mean":
        mask = selected != 0
        _, tokens_S = per_sequence(selected, batch, mask)
        return selected * scale / spread(tokens_S, batch).clamp_min(1)
    return selected * scale
