"""Divergences between two next-token distributions at the same state, named by formula, in nats."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from statewise.component import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from statewise.types import Batch, TokenStats


def kl(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v) over the last axis; 0 with zero gradient at equality."""
    log_p, log_q = logits_p.log_softmax(-1), logits_q.log_softmax(-1)
    p = log_p.exp()
    # An impossible token adds nothing; without the guard 0 * (-inf - ...) is NaN.
    return ((log_p - log_q).where(p > 0, 0.0) * p).sum(-1)


def jsd(logits_p: Tensor, logits_q: Tensor, beta: float) -> Tensor:
    """Generalised Jensen-Shannon divergence, scaled so that it is one continuous family in beta.

    (beta KL(p || m) + (1 - beta) KL(q || m)) / (beta (1 - beta)), m = beta p + (1 - beta) q. Its limits are KL(p || q) at
    beta = 0 and KL(q || p) at beta = 1, which are returned there; at 0.5 it is 4 times the Jensen-Shannon divergence. The
    unscaled form tends to 0 at both ends, so that a sweep over beta jumps where an implementation special-cases the ends.
    """
    if beta in (0.0, 1.0):
        return kl(logits_p, logits_q) if beta == 0.0 else kl(logits_q, logits_p)
    log_p, log_q = logits_p.log_softmax(-1), logits_q.log_softmax(-1)
    log_m = (log_p + math.log(beta)).logaddexp(log_q + math.log1p(-beta))
    p, q = log_p.exp(), log_q.exp()
    to_p = ((log_p - log_m).where(p > 0, 0.0) * p).sum(-1)
    to_q = ((log_q - log_m).where(q > 0, 0.0) * q).sum(-1)
    return (beta * to_p + (1 - beta) * to_q) / (beta * (1 - beta))


def shared_vocabulary(student: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Both on the ids that both have: one tokenizer with padded vocabularies of two sizes. The rest is left out of the
    softmax, since no text contains it."""
    size = min(student.shape[-1], other.shape[-1])
    return student[..., :size], other[..., :size]


def coarsen(logits: Tensor, ids: Tensor) -> Tensor:
    """Logits [..., K + 1] of the distribution in which the tokens `ids` [..., K] stay apart and all others are one bucket.

    A divergence between two coarsened distributions is at most the one between the full ones, 0 where they are equal, and
    has the gradient of its value: mass that leaves the K tokens is paid for in the bucket.
    """
    import torch

    rest = logits.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logits.gather(-1, ids), rest], -1)


class ReferenceKL(Loss, kind="reference_kl"):
    """KL between the policy and the frozen reference at every state, full vocabulary, exact.

    direction "reference_policy": KL(p_ref || p), as ASFT (arXiv 2509.23753) has it; "policy_reference": KL(p || p_ref).
    """

    is_divergence: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("logits",)
    reads: ClassVar[tuple[str, ...]] = ("reference_logits",)

    direction: Literal["reference_policy", "policy_reference"] = "reference_policy"

    @property
    def words(self) -> str:  # type: ignore[override]
        return "KL(p_ref || p)" if self.direction == "reference_policy" else "KL(p || p_ref)"

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        assert stats.logits is not None
        reference = batch.dense["reference_logits"]
        if self.direction == "reference_policy":
            return kl(reference, stats.logits)
        return kl(stats.logits, reference)


class TeacherDivergence(Loss):
    """A divergence from the teacher's next-token distribution.

    temperature: of the signal, whatever that of the states is; both distributions are softmax(logits / temperature).
    top_k: the K most probable tokens of `support` stay apart and the rest is one bucket, see `coarsen`; without it the
    full vocabulary. clip: bound on the divergence of a token, after the sum over the vocabulary; a token at the bound
    gives no gradient.
    """

    is_divergence: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("logits",)
    reads: ClassVar[tuple[str, ...]] = ("teacher_logits",)
    formula: ClassVar[str] = ""

    temperature: float = Field(1.0, gt=0)
    top_k: int | None = Field(None, ge=1)
    support: Literal["teacher", "student"] = "teacher"
    clip: float | None = Field(None, gt=0)

    @property
    def words(self) -> str:  # type: ignore[override]
        kept = "full vocabulary" if self.top_k is None else f"the {self.support}'s top {self.top_k} and the rest as one"
        clip = "" if self.clip is None else f", at most {self.clip:g} a token"
        return f"{self.formula} over {kept} at temperature {self.temperature:g}{clip}"

    @abstractmethod
    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Of logits [..., V], reduced over V."""

    def __call__(self, stats: TokenStats, batch: Batch) -> Tensor:
        student, teacher = self._pair(stats, batch)
        value = self.divergence(student, teacher)
        return value if self.clip is None else value.clamp(max=self.clip)

    def monitor(self, stats: TokenStats, batch: Batch) -> dict[str, Tensor]:
        """`outside_mass`, `teacher_outside_mass`: the probability each gives to the tokens in the bucket."""
        student, teacher = self._pair(stats, batch)
        if self.top_k is None or student.shape[-1] != self.top_k + 1:
            return {}
        return {
            "outside_mass": student.softmax(-1)[..., -1],
            "teacher_outside_mass": teacher.softmax(-1)[..., -1],
        }

    def _pair(self, stats: TokenStats, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits of student and teacher that the divergence is taken between."""
        assert stats.logits is not None
        student, teacher = shared_vocabulary(stats.logits, batch.dense["teacher_logits"])
        if batch.temperature != self.temperature:
            back = batch.temperature / self.temperature
            student, teacher = student * back, teacher * back
        if self.top_k is None or self.top_k >= student.shape[-1]:
            return student, teacher
        ids = (teacher if self.support == "teacher" else student).detach().topk(self.top_k, dim=-1).indices
        return coarsen(student, ids), coarsen(teacher, ids)


class TeacherStudentKL(TeacherDivergence, kind="kl_teacher_student"):
    """Forward KL(p_T || p_S) = sum_v p_T (log p_T - log p_S): covers what the teacher does."""

    formula: ClassVar[str] = "KL(p_T || p_S)"

    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        return kl(teacher, student)


class StudentTeacherKL(TeacherDivergence, kind="kl_student_teacher"):
    """Reverse KL(p_S || p_T) = sum_v p_S (log p_S - log p_T): avoids what the teacher would not do."""

    formula: ClassVar[str] = "KL(p_S || p_T)"

    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        return kl(student, teacher)


class TeacherJSD(TeacherDivergence, kind="jsd"):
    """Scaled generalised Jensen-Shannon divergence, see `jsd`: beta = 0 is KL(p_T || p_S), beta = 1 is KL(p_S || p_T)."""

    formula: ClassVar[str] = "JSD_beta(p_T, p_S) / (beta (1 - beta))"

    beta: float = Field(0.5, ge=0, le=1)

    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        return jsd(teacher, student, self.beta)
