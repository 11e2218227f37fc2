"""RPSFT's penalty: its gradient is autograd's, and it keeps the block that it is about."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from statewise import train
from statewise.recipe import Recipe
from statewise.settings import Rpsft
from statewise.training.rpsft import KeepLeading


def by_autograd(weight: torch.Tensor, start: torch.Tensor, rank: int, normalised: bool) -> tuple[torch.Tensor, float]:
    """Gradient and value of ||U^T (W - W_0) V||_F^2, over ||U^T W_0 V||_F^2 where normalised, in float64."""
    left, _, right = torch.linalg.svd(start.double(), full_matrices=False)
    u, v = left[:, :rank], right[:rank].T
    w = weight.detach().double().requires_grad_()
    value = (u.T @ (w - start.double()) @ v).square().sum()
    if normalised:
        value = value / (u.T @ start.double() @ v).square().sum()
    value.backward()
    return w.grad, float(value.detach())


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("rank", [1, 5, 99])
def test_the_gradient_is_autograds(rank: int, normalised: bool) -> None:
    torch.manual_seed(0)
    start = torch.randn(12, 20)
    weight = nn.Parameter(start + 0.1 * torch.randn(12, 20))
    hook = KeepLeading(Rpsft(rank=rank, coef=0.5, normalised=normalised), {"w": weight}, {"w": start})
    weight.grad = torch.ones_like(weight)
    hook.before_update()
    expected, value = by_autograd(weight, start, rank, normalised)
    assert torch.allclose(weight.grad - 1, 0.5 * expected.float(), atol=1e-5)
    assert hook.after_step(1)["rpsft/penalty"] == pytest.approx(0.5 * value, rel=1e-5)
    if rank == 99:  # all directions of the shorter side are not all of the longer one
        assert not torch.allclose(expected, 2 * (weight - start).double(), atol=1e-3)


def test_at_full_rank_of_a_square_matrix_it_is_the_distance_to_the_start() -> None:
    torch.manual_seed(0)
    start = torch.randn(8, 8)
    weight = nn.Parameter(start + torch.randn(8, 8))
    hook = KeepLeading(Rpsft(rank=8), {"w": weight}, {"w": start})
    weight.grad = torch.zeros_like(weight)
    hook.before_update()
    assert torch.allclose(weight.grad, 2 * (weight - start), atol=1e-4)


def test_a_run_keeps_the_block(plain: dict[str, Any], tmp_path: Path) -> None:
    blocks = {}
    for coef in (1e-6, 100.0):
        plain["optim"] = {"lr": 3e-3, "rpsft": {"rank": 8, "coef": coef}}
        run = train(Recipe.from_plain(plain, name="small"), tmp_path / str(coef), quiet=True)
        rows = [row for row in run.metrics() if "rpsft/penalty" in row]
        assert rows[0]["rpsft/penalty"] == 0.0
        blocks[coef] = rows[-1]["rpsft/penalty"] / coef
    assert blocks[100.0] < 0.5 * blocks[1e-6]
