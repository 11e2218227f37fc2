"""The frozen reference: the policy at step 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from statewise.component import Signal

if TYPE_CHECKING:
    from statewise.types import Batch, World


class Reference(Signal, kind="reference"):
    """Writes `reference_logprobs` (nats a token) and `reference_logits` (dense, made a chunk at a time).

    With LoRA the reference is the policy with its adapter disabled, which costs no memory; with full training it is a
    second copy of the weights, of exactly step 0.
    """

    writes: ClassVar[tuple[str, ...]] = ("reference_logprobs", "reference_logits")

    def attach(self, batch: Batch, world: World) -> Batch:
        return world.reference.attach(batch, "reference")
