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
        """What was measured while the run trained, a row a measured step."""
        prefix = "geometry/"
        rows = (
            {k.removeprefix(prefix): v for k, v in r.items() if k.startswith(prefix)} | {"step": r["step"]}
            for r in run.metrics()
        )
        return [row for row in rows if len(row) > 1]

    def render(self, table: list[dict[str, Any]]) -> list[Any]:
        """Six panels over the steps."""
        from statewise.geometry.panels import Panel, panels

        shown = (
            Panel("‖D‖<sub>F</sub>, mean over matrices", "frobenius"),
            Panel("stable rank of D", "stable_rank"),
            Panel(f"Hill estimate, {self.k} values", f"hill{self.k}"),
            Panel(f"energy in the top {self.k} directions", f"top{self.k}_energy", share=True),
            Panel("entries with their first bf16 code", "unchanged_share", share=True),
            Panel("moved by the step: visible in bf16", "visible_share", share=True),
        )
        return [panels({"run": table}, shown, "step", "step")] if table else []
