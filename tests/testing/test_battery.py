"""The public battery on every registered loss, weight and selector, and on components that break one rule each."""

from typing import Any, ClassVar

import pytest
import torch

from statewise.component import Component, Loss, Selector, Weight, kinds
from statewise.objective import per_group, per_sequence
from statewise.testing import battery
from statewise.testing.fixtures import sample_settings

ROLES = ("loss", "weight", "selector")
BUILT_IN = [cls for role in ROLES for cls in kinds(role).values() if cls.__module__.startswith("statewise.")]


@pytest.mark.parametrize("cls", BUILT_IN, ids=lambda c: f"{c.role}-{c.kind}")
def test_every_registered_component_passes(cls: type[Component]):
    checks = battery(cls)
    assert len(checks) >= 3
    assert [c for c in checks if not c.passed] == []


def failed(component: Component | type[Component]) -> set[str]:
    return {check.name.split("[")[0] for check in battery(component) if not check.passed}


class MeanOfBatch(Loss, kind="broken_mean"):
    """Divides by what happens to be in the micro-batch."""

    needs: ClassVar = ("logprobs",)
    reads: ClassVar = ("gold",)

    def __call__(self, stats: Any, batch: Any) -> torch.Tensor:
        return -stats.logprobs / batch.tokens_BT.shape[-1]


class Leaky(Weight, kind="broken_reads"):
    """Reads a column that it does not declare."""

    needs: ClassVar = ("logprobs",)

    def __call__(self, stats: Any, batch: Any) -> torch.Tensor:
        return stats.logprobs.exp() + batch.columns.get("rewards", 0.0)


class Negative(Weight, kind="broken_sign"):
    needs: ClassVar = ("logprobs",)

    def __call__(self, stats: Any, batch: Any) -> torch.Tensor:
        return stats.logprobs


class Unused(Weight, kind="broken_needs"):
    needs: ClassVar = ("logprobs", "entropy")

    def __call__(self, stats: Any, batch: Any) -> torch.Tensor:
        return stats.logprobs.exp()


class Overflow(Weight, kind="broken_overflow"):
    needs: ClassVar = ("logprobs",)

    def __call__(self, stats: Any, batch: Any) -> torch.Tensor:
        return (-stats.logprobs).exp()


class Offset(Loss, kind="broken_divergence"):
    """Not zero where policy and reference are equal."""

    is_divergence: ClassVar = True
    needs: ClassVar = ("logits",)
    reads: ClassVar = ("reference_logits",)

    def __call__(self, stats: Any, batch: Any) -> torch.Tensor:
        log_q = batch.dense["reference_logits"].log_softmax(-1)
        return -(log_q.exp() * stats.logits.log_softmax(-1)).sum(-1)


class OutsideActions(Selector, kind="broken_selector"):
    def __call__(self, batch: Any) -> torch.Tensor:
        return torch.ones(batch.tokens_BT.shape)


class Neighbour(Loss, kind="broken_locality"):
    """Looks at the next token too."""

    needs: ClassVar = ("logprobs",)
    reads: ClassVar = ("gold",)

    def __call__(self, stats: Any, batch: Any) -> torch.Tensor:
        return -(stats.logprobs + stats.logprobs.roll(-1, -1))


class FirstOfGroup(Loss, kind="broken_order"):
    """Takes for the better sequence of a pair whichever comes first in the batch."""

    scope: ClassVar = "group"
    needs: ClassVar = ("logprobs",)

    def __call__(self, stats: Any, batch: Any) -> torch.Tensor:
        total, _ = per_sequence(stats.logprobs, batch)
        _, index = batch.group_S.unique(return_inverse=True)
        first = torch.stack([index[:i].eq(g).sum() == 0 for i, g in enumerate(index)])
        return -torch.nn.functional.logsigmoid(per_group(total.where(first, -total), batch))


@pytest.mark.parametrize(
    ("component", "expected"),
    [
        (MeanOfBatch, "partition"),
        (Leaky, "declarations"),
        (Negative, "weight_values"),
        (Unused, "declarations"),
        (Overflow, "extreme_logits"),
        (Offset, "equality"),
        (OutsideActions, "selector"),
        (Neighbour, "partition"),
        (FirstOfGroup, "permutation"),
    ],
)
def test_a_broken_component_fails_the_check_of_its_fault(component: type[Component], expected: str):
    assert expected in failed(component)


def test_a_check_that_raises_is_a_failed_check():
    class Raises(Weight, kind="broken_raises"):
        needs: ClassVar = ("logprobs",)

        def __call__(self, stats: Any, batch: Any) -> torch.Tensor:
            raise RuntimeError("inside the plug-in")

    details = " ".join(c.detail for c in battery(Raises) if not c.passed)
    assert "RuntimeError: inside the plug-in" in details


def test_settings_without_defaults_are_guessed_or_given():
    class Given(Weight, kind="given_example"):
        example: ClassVar = {"power": 3.0}
        needs: ClassVar = ("logprobs",)
        power: float

        def __call__(self, stats: Any, batch: Any) -> torch.Tensor:
            return stats.logprobs.exp() ** self.power

    assert sample_settings(Given).power == 3.0
    assert failed(Given) == set()
