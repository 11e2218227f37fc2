"""EffOPD's extrapolation at powers of two, behind a validation gate (arXiv 2605.11739)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from statewise.training.distributed import total
from statewise.training.hooks import Hook, matrices

if TYPE_CHECKING:
    from statewise.models.load import LoadedPolicy
    from statewise.recipe import Recipe

BEFORE = "extrapolation"  # in World.state: the weights that the last power of two left


class Extrapolation(Hook):
    """W_k = W + factor k (W - W_before), k = 1, 2, ...: the last before the first that scores worse stays.

    The optimizer's state is left as it is. Rank 0 scores; the others follow.
    """

    def __init__(
        self, recipe: Recipe, policy: LoadedPolicy, accelerator: Any, start: dict[str, Any], state: dict[str, Any]
    ):
        assert recipe.optim.extrapolate is not None
        self.settings, self.recipe, self.policy = recipe.optim.extrapolate, recipe, policy
        self.accelerator, self.state = accelerator, state
        self.kept = matrices(policy.model, self.settings.modules)
        held = state.get(BEFORE, start)
        state[BEFORE] = {name: held[name].to(p.device, copy=True) for name, p in self.kept.items()}

    @torch.no_grad()
    def after_step(self, step: int) -> dict[str, float]:
        """After a power of two `extrapolated`, the accepted k (0: none), and `extrapolation_score`, of what was kept."""
        if step & (step - 1):
            return {}
        here = {name: p.detach().clone() for name, p in self.kept.items()}
        accepted, best = 0, self._score()
        for k in range(1, self.settings.candidates + 1):
            self._move(here, k)
            score = self._score()
            if not (score > best if self.settings.strict else score >= best):
                break
            accepted, best = k, score
        self._move(here, accepted)
        self.state[BEFORE] = {name: p.detach().clone() for name, p in self.kept.items()}
        return {"extrapolated": accepted, "extrapolation_score": best}

    def _move(self, here: dict[str, Any], k: int) -> None:
        """To W_k, computed in float32 from W at `here`."""
        for name, parameter in self.kept.items():
            change = here[name].float() - self.state[BEFORE][name].float()
            parameter.copy_(here[name].float() + self.settings.factor * k * change)

    def _score(self) -> float:
        """Of the current weights on the task, larger is better; the same on every rank."""
        score = 0.0
        if self.accelerator.is_main_process:
            from statewise import evals

            recipe = self.recipe
            results = evals.run(
                self.policy,
                [self.settings.task],
                seed=recipe.seed,
                batch_tokens=recipe.eval.batch_tokens,
                base_dir=recipe.base_dir,
            )
            (result,) = results.values()
            score = result.mean if result.higher_is_better else -result.mean
        return total([score], self.accelerator)[0]
