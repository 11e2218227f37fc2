"""Losses of preference pairs: the chosen completion y_w against the rejected one y_l of the same prompt.

Formulas as pure functions of a margin, and the components that recipes name. A margin is score(y_w) - score(y_l), with the
score a sum or mean over the completion's tokens of log pi, or of log pi / pi_ref.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from statewise.component import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from statewise.types import Batch, TokenStats


def dpo(margin: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m), m of summed log pi / pi_ref, e = label_smoothing.

    Source: arXiv 2305.18290; e is the share of labels that are taken to be flipped.
    """
    from torch.nn.functional import logsigmoid

    scaled = beta * margin
    return -(1 - label_smoothing) * logsigmoid(scaled) - label_smoothing * logsigmoid(-scaled)


def ipo(margin: Tensor, *, beta: float = 0.1) -> Tensor:
    """(m - 1 / (2 beta))^2, m of mean log pi / pi_ref: the margin has a target, and is not driven to infinity.

    Source: arXiv 2310.12036, tau = beta; the mean over tokens is what its authors ran (as in TRL).
    """
    return (margin - 1 / (2 * beta)) ** 2


def simpo(margin: Tensor, *, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """-log sigmoid(beta m - gamma), m of mean log pi: no reference. Source: arXiv 2405.14734."""
    from torch.nn.functional import logsigmoid

    return -logsigmoid(beta * margin - gamma)


class Pairwise(Loss):
    """A function of the margin of a pair; `mean`: scores are means over tokens; `relative`: of log pi / pi_ref.

    nll: coefficient of the chosen completion's mean -log pi a token, which keeps it likely (RPO, arXiv 2404.19733).
    """

    scope: ClassVar[str] = "group"
    needs: ClassVar[tuple[str, ...]] = ("logprobs",)
    mean: ClassVar[bool] = False
    relative: ClassVar[bool] = False

    nll: float = Field(0.0, ge=0)

    def columns_read(self) -> frozenset[str]:
        return frozenset({"preferences", *(["reference_logprobs"] if self.relative else [])})

    @abstractmethod
    def value(self, margin_G: Tensor) -> Tensor:
        """The loss of every pair."""

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        from statewise.objective import per_group, per_sequence

        value = self.value(self.margin(stats, batch))
        if self.nll == 0:
            return value
        total, count = per_sequence(stats.logprobs, batch)
        return value - self.nll * per_group(total / count.clamp_min(1) * (_sign(batch) > 0), batch)

    def margin(self, stats: TokenStats, batch: Batch) -> Tensor:
        """Score of the chosen completion minus that of the rejected one, [G], nats."""
        from statewise.objective import per_group, per_sequence

        values = stats.logprobs - batch.column("reference_logprobs") if self.relative else stats.logprobs
        total, count = per_sequence(values, batch)
        return per_group((total / count.clamp_min(1) if self.mean else total) * _sign(batch), batch)

    def monitor(self, stats: TokenStats, batch: Batch) -> dict[str, Tensor]:
        """The margin, whether it is positive, and the summed log-probabilities of both completions, each [G]."""
        from statewise.objective import per_group, per_sequence

        margin, sign = self.margin(stats, batch), _sign(batch)
        logprobs, _ = per_sequence(stats.logprobs, batch)
        return {
            "margin": margin,
            "accuracy": (margin > 0).to(margin.dtype),
            "chosen_logprobs": per_group(logprobs * (sign > 0), batch),
            "rejected_logprobs": per_group(logprobs * (sign < 0), batch),
        }


def _sign(batch: Batch) -> Tensor:
    """+1 for a chosen sequence, -1 for a rejected one, 0 for one without a selected token, [S]."""
    from statewise.objective import per_sequence

    total, count = per_sequence(batch.column("preferences"), batch)
    return total / count.clamp_min(1)


class DPO(Pairwise, kind="dpo"):
    """-log sigmoid(beta m), m = log pi(y_w)/pi_ref(y_w) - log pi(y_l)/pi_ref(y_l), sums over tokens."""

    relative: ClassVar[bool] = True
    words: ClassVar[str] = "-log sigmoid(beta m), m = log p/p_ref of the chosen minus that of the rejected"

    beta: float = Field(0.1, gt=0)
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)

    def value(self, margin_G: Tensor) -> Tensor:
        return dpo(margin_G, beta=self.beta, label_smoothing=self.label_smoothing)


class IPO(Pairwise, kind="ipo"):
    """(m - 1 / (2 beta))^2, m the difference of the mean log pi / pi_ref a token."""

    mean: ClassVar[bool] = True
    relative: ClassVar[bool] = True
    words: ClassVar[str] = "(m - 1/(2 beta))^2, m = mean log p/p_ref of the chosen minus that of the rejected"

    beta: float = Field(0.1, gt=0)

    def value(self, margin_G: Tensor) -> Tensor:
        return ipo(margin_G, beta=self.beta)


class SimPO(Pairwise, kind="simpo"):
    """-log sigmoid(beta m - gamma), m the difference of the mean log pi a token."""

    mean: ClassVar[bool] = True
    words: ClassVar[str] = "-log sigmoid(beta m - gamma), m = mean log p of the chosen minus that of the rejected"

    beta: float = Field(2.0, gt=0)
    gamma: float = Field(1.0, ge=0)

    def value(self, margin_G: Tensor) -> Tensor:
        return simpo(margin_G, beta=self.beta, gamma=self.gamma)
