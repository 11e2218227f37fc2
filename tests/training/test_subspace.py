"""Training inside a subspace: what confines the change and what doesn't, where the subspace comes from, resuming."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.training.conftest import losses_of, weights_of
from tests.training.test_distributed import _shard_on_cpu, run_on, same
from tests.training.test_loop import _killed, run_in_child
from torch import nn

from statewise import train
from statewise.errors import RecipeError
from statewise.recipe import Recipe
from statewise.run import RunDir
from statewise.settings import Subspace
from statewise.training.hooks import matrices
from statewise.training.origin import places
from statewise.training.subspace import Basis, Confined, leading

K, LAST = 8, 6


def confined(mode: str, optimizer: str, decay: float = 0.0, side: str = "right", steps: int = 30) -> tuple[Any, Any]:
    """A [64, 48] matrix under a gradient of fixed mean and fresh noise: the hook after `steps`, and the change."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 48) * 0.02)
    start = {"w": weight.detach().clone()}
    mean = torch.randn(64, K) @ torch.randn(K, 48)
    hook = Confined(mode, {"w": weight}, {"w": leading(mean.double(), K, side)}, start)
    if optimizer == "sgd":
        taken: torch.optim.Optimizer = torch.optim.SGD([weight], lr=1e-3, weight_decay=decay)
    else:
        taken = torch.optim.AdamW([weight], lr=1e-3, betas=(0.9, 0.98), weight_decay=decay)
    for _ in range(steps):
        weight.grad = mean + torch.randn(64, 48)
        hook.before_update()
        taken.step()
        hook.after_update()
    return hook, weight.detach() - start["w"]


def rank_of(change: torch.Tensor) -> int:
    return int(torch.linalg.matrix_rank(change.double(), rtol=1e-4))


def test_a_projected_gradient_confines_sgd_and_not_adam() -> None:
    hook, change = confined("gradient", "sgd")
    assert hook.leaked() < 1e-9 and rank_of(change) == K
    hook, change = confined("gradient", "adamw")
    assert 0.02 < hook.leaked() < 0.4 and rank_of(change) == 48


def test_decay_leads_out_of_the_subspace_of_gradients() -> None:
    assert confined("gradient", "sgd", decay=0.1)[0].leaked() > 1e-7
    assert confined("gradient", "adamw", decay=10.0)[0].leaked() > confined("gradient", "adamw")[0].leaked() + 0.005


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_projected_update_confines_every_optimizer(optimizer: str, side: str) -> None:
    hook, change = confined("update", optimizer, decay=0.1, side=side)
    assert hook.leaked() < 1e-9 and rank_of(change) == K
    assert change.norm() > 0.1


def test_the_leak_sees_a_wrong_side_and_a_wrong_subspace() -> None:
    hook, _ = confined("update", "adamw")
    basis = hook.bases["w"]
    other = leading(torch.randn(64, 48, dtype=torch.float64), K, "both")
    hook.bases["w"] = Basis(None, other.right.float())
    assert hook.leaked() > 0.5
    hook.bases["w"] = Basis(other.left.float(), basis.right)
    assert hook.leaked() > 0.5


def test_share_of_the_gradient_inside() -> None:
    hook, _ = confined("gradient", "sgd", steps=1)
    torch.manual_seed(0)
    torch.randn(64, 48)
    mean = torch.randn(64, K) @ torch.randn(K, 48)
    gradient = mean + torch.randn(64, 48)
    inside = (gradient @ hook.bases["w"].right).square().sum() / gradient.square().sum()
    assert hook.after_step(1)["subspace/gradient_inside"] == pytest.approx(float(inside), rel=1e-5)


def test_leading_directions_are_those_of_the_singular_value_decomposition() -> None:
    torch.manual_seed(0)
    left, right = torch.linalg.qr(torch.randn(40, 3, dtype=torch.float64)).Q, torch.linalg.qr(torch.randn(30, 3)).Q
    matrix = (left @ torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)) @ right.double().T).float()
    both = leading(matrix, 3, "both")
    assert torch.allclose(both.project(matrix), matrix, atol=1e-5)
    one = leading(matrix, 1, "right")
    assert one.left is None and float(one.project(matrix).norm()) == pytest.approx(3.0, rel=1e-5)


def test_sixteen_bits_are_refused_in_update_mode() -> None:
    weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    with pytest.raises(RecipeError, match="model.dtype = 'float32'"):
        Confined("update", {"w": weight}, {}, {"w": weight.detach()})


# Runs.


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """A run to take the subspace from, with all its checkpoints."""
    path = tmp_path_factory.mktemp("first") / "run"
    train(_recipe(model_dir, checkpoint={"every": 2, "keep_last": 9}), path, quiet=True)
    return path


def _recipe(model_dir: Path, optim: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    plain = {
        "model": {"path": str(model_dir)},
        "source": {"kind": "dataset", "data": "tiny:math", "count": 24},
        "signal": ["gold"],
        "objective": ["nll"],
        "batch": {"rollouts": 8, "micro_rows": 4},
        "optim": {"lr": 1e-2, "weight_decay": 0.1, **(optim or {})},
        "checkpoint": {"every": 2},
        "budget": {"max_steps": LAST},
        **changes,
    }
    return Recipe.from_plain(plain, name="small")


def leaks(run: RunDir) -> list[float]:
    return [row["subspace/leaked"] for row in run.metrics() if "subspace/leaked" in row]


def test_update_mode_confines_a_run_and_gradient_mode_does_not(first: Path, model_dir: Path, tmp_path: Path) -> None:
    leaked = {}
    for mode in ("update", "gradient"):
        settings = {"from": str(first), "at": 2, "rank": 4, "mode": mode}
        run = train(_recipe(model_dir, {"subspace": settings}), tmp_path / mode, quiet=True)
        leaked[mode] = leaks(run)[-1]
        before, after = (
            load_file(model_dir / "model.safetensors"),
            load_file(run.checkpoints()[LAST] / "model.safetensors"),
        )
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved and all(".self_attn." in name or ".mlp." in name for name in moved)
        name = "model.layers.1.mlp.down_proj.weight"
        target = load_file(first / "checkpoints" / "step_000002" / "model.safetensors")[name] - before[name]
        right = leading(target.double(), 4, "right").right.double()
        change = (after[name] - before[name]).double()
        outside = float((change - change @ right @ right.T).square().sum() / change.square().sum())
        assert outside < 1e-9 if mode == "update" else outside > 1e-3
    assert leaked["update"] < 1e-9 < 1e-3 < leaked["gradient"]


@pytest.mark.parametrize("optim", [{"optimizer": "adamw"}, {"optimizer": "sgd", "momentum": 0.9}])
@pytest.mark.parametrize("mode", ["gradient", "update"])
def test_killed_and_resumed_ends_with_the_same_bytes(
    optim: dict[str, Any], mode: str, first: Path, model_dir: Path, tmp_path: Path
) -> None:
    """Even where the run that the subspace came from is gone."""
    origin = tmp_path / "origin"
    shutil.copytree(first, origin)
    recipe = _recipe(model_dir, {**optim, "subspace": {"from": str(origin), "rank": 4, "mode": mode}})
    train(recipe, tmp_path / "whole", quiet=True)
    assert run_in_child(_killed(recipe, tmp_path / "cut", "statewise.training.loop.take_step", 4)) == -signal.SIGKILL
    shutil.rmtree(origin)
    train(recipe, tmp_path / "cut", resume=True, quiet=True)
    for file in ("model.safetensors", "optimizer.safetensors", "components.safetensors"):
        assert weights_of(tmp_path / "cut", LAST, file) == weights_of(tmp_path / "whole", LAST, file)
    whole, cut = (RunDir.open(tmp_path / name) for name in ("whole", "cut"))
    assert losses_of(cut) == losses_of(whole)
    assert leaks(cut) == leaks(whole)


def test_two_processes_equal_one_and_shards_are_refused(
    first: Path, plain: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain["optim"] = {"lr": 1e-2, "subspace": {"from": str(first), "rank": 4, "mode": "update"}, "rpsft": {"rank": 4}}
    same(run_on(1, plain, tmp_path / "one"), run_on(2, plain, tmp_path / "two"))
    _shard_on_cpu(monkeypatch)
    with pytest.raises(RuntimeError, match="optim.subspace.*sharded"):
        run_on(2, plain, tmp_path / "sharded")


def test_a_random_subspace_is_a_function_of_the_seed(model_dir: Path, tmp_path: Path) -> None:
    budget = {"max_steps": 1}
    optim = {"subspace": {"from": "random", "rank": 4, "others": "free", "modules": ["q_proj", "up_proj"]}}
    held = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(_recipe(model_dir, optim, budget=budget, seed=seed), tmp_path / name, quiet=True)
        held.append(load_file(tmp_path / name / "checkpoints/step_000001/components.safetensors"))
    assert len(held[0]) == 4  # two modules of two layers
    for key, value in held[0].items():
        assert torch.equal(value, held[1][key]) and not torch.equal(value, held[2][key])
        assert torch.allclose(value.T @ value, torch.eye(4), atol=1e-5)


def test_optimizer_state_is_kept_by_name_or_reset(first: Path, model_dir: Path, tmp_path: Path) -> None:
    at = first / "checkpoints" / "step_000004"
    model, subspace = {"path": str(at)}, {"from": str(first), "rank": 4, "mode": "gradient"}
    moments = {}
    for state in ("keep", "reset"):
        recipe = _recipe(
            model_dir,
            {"state": state, "subspace": subspace, "betas": [0.9, 0.99]},
            model=model,
            budget={"max_steps": 1},
        )
        run = train(recipe, tmp_path / state, quiet=True)
        moments[state] = load_file(run.checkpoints()[1] / "optimizer.safetensors")
    stored = load_file(at / "optimizer.safetensors")
    key = next(k for k in stored if "q_proj" in k and k.endswith("exp_avg_sq"))
    assert torch.allclose(moments["keep"][key], 0.99 * stored[key], rtol=0.3)
    assert moments["keep"][key].sum() > 0.9 * stored[key].sum() > moments["reset"][key].sum()
    steps = {s: float(v[next(k for k in v if k.endswith("q_proj.weight/step"))]) for s, v in moments.items()}
    assert steps == {"keep": 5.0, "reset": 1.0}
    with pytest.raises(RecipeError, match="has no optimizer.safetensors"):
        train(_recipe(model_dir, {"state": "keep"}), tmp_path / "none", quiet=True)


def test_where_the_subspace_comes_from(first: Path, model_dir: Path, tmp_path: Path) -> None:
    def of(**settings: Any) -> tuple[Path, Path]:
        end, base = places(Subspace.model_validate({"rank": 2, **settings}), "own")
        return Path(end), Path(base)

    steps = first / "checkpoints"
    assert of(**{"from": str(first)}) == (steps / "step_000006", model_dir)
    assert of(**{"from": str(first), "at": 2}) == (steps / "step_000002", model_dir)
    assert of(**{"from": str(steps / "step_000004")}) == (steps / "step_000004", model_dir)
    assert of(**{"from": str(model_dir)}) == (model_dir, Path("own"))
    assert of(**{"from": str(first), "base": "other"})[1] == Path("other")
    with pytest.raises(RecipeError, match=r"steps \[2, 4, 6\]"):
        of(**{"from": str(first), "at": 3})
    with pytest.raises(RecipeError, match="no run directory"):
        of(**{"from": str(model_dir), "at": 3})
    with pytest.raises(RecipeError, match="no direction"):
        train(_recipe(model_dir, {"subspace": {"from": str(model_dir), "rank": 2}}), tmp_path / "run", quiet=True)


def test_refusals(model_dir: Path) -> None:
    subspace = {"from": "random", "rank": 2}
    with pytest.raises(RecipeError, match="optim.subspace: works on the weight matrices.*rank 16"):
        _recipe(model_dir, {"subspace": subspace}, model={"path": str(model_dir), "adapter": {}})
    with pytest.raises(RecipeError, match="rounding to 16 bits"):
        model = {"path": str(model_dir), "dtype": "bfloat16"}
        _recipe(model_dir, {"subspace": {**subspace, "mode": "update"}}, model=model)
    with pytest.raises(RecipeError, match="did you mean 'rank'"):
        _recipe(model_dir, {"subspace": {**subspace, "rnak": 2}})
    from statewise.models.load import load_policy

    with pytest.raises(RecipeError, match="did you mean 'q_proj'"):
        matrices(load_policy(str(model_dir)).model, ["q_prj"])
