"""What training does to the weight matrices: a few numbers every n steps, and the trajectory over the checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from statewise.component import Diagnostic

if TYPE_CHECKING:
    from statewise.types import World


class Geometry(Diagnostic, kind="geometry"):
    """Norm, stable rank, tail and bf16 visibility of D = W - W_start, over the linear modules but the head.

    every: steps between rows of numbers. k: leading directions, in the energy and in the Hill estimate. modules: names such
    as "q_proj" (none: all). LoRA: the change of the weights that the adapter makes.
    """

    every: int = Field(20, ge=1)
    k: int = Field(16, ge=2)
    modules: list[str] = []

    def watch(self, world: World) -> Any:
        """The hook that measures while the run trains."""
        from statewise.diagnostics.live import Watch

        return Watch(self.every, self.k, self.modules, world)

    def compute(self, run: Any) -> list[dict[str, Any]]:
        """A row a checkpoint of the run: see `statewise geometry --trajectory`."""
        raise NotImplementedError
