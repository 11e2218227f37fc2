"""Every shipped recipe on the embedded model: its trajectory, and that neither the split of a batch, packing, the number of
processes nor a kill changes it."""

import json
import multiprocessing
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.golden.recipes import FILE, NAMES, STEPS, make_teacher, small, trajectory
from tests.training.conftest import losses_of, weights_of
from tests.training.test_distributed import _free_port, as_rank
from tests.training.test_loop import _killed, run_in_child

from statewise import train
from statewise.run import RunDir

GOLDEN = json.loads(FILE.read_text())


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("golden") / "teacher")


@pytest.fixture(scope="session")
def runs(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDir]:
    folder = tmp_path_factory.mktemp("whole")
    return {name: train(small(name, teacher), folder / name, quiet=True) for name in NAMES}


def test_every_recipe_has_a_trajectory():
    assert sorted(GOLDEN) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_trajectory_is_the_known_one(name: str, runs: dict[str, RunDir]):
    found = trajectory(runs[name])
    assert found["tokens"] == GOLDEN[name]["tokens"]
    assert found["loss"] == pytest.approx(GOLDEN[name]["loss"], rel=2e-3, abs=2e-5)
    assert found["grad_norm"] == pytest.approx(GOLDEN[name]["grad_norm"], rel=2e-2, abs=1e-4)
    assert any(found["grad_norm"])


@pytest.mark.parametrize("split", ["batch.micro_rows=1", "batch.pack=384"])
@pytest.mark.parametrize("name", NAMES)
def test_any_split_of_a_batch_gives_the_same_losses(
    name: str, split: str, teacher: Path, runs: dict[str, RunDir], tmp_path: Path
):
    changes = [split, *(["batch.micro_rows=none"] if "pack" in split else [])]
    run = train(small(name, teacher, *changes), tmp_path / "run", quiet=True)
    assert losses_of(run) == pytest.approx(losses_of(runs[name]), abs=3e-5)
    assert trajectory(run)["tokens"] == trajectory(runs[name])["tokens"]


@pytest.mark.parametrize("name", NAMES)
def test_killed_and_resumed_ends_with_the_same_bytes(name: str, teacher: Path, runs: dict[str, RunDir], tmp_path: Path):
    recipe, cut = small(name, teacher), tmp_path / "cut"
    assert run_in_child(_killed(recipe, cut, "statewise.training.loop.take_step", 3)) == -signal.SIGKILL
    resumed = train(recipe, cut, resume=True, quiet=True)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert weights_of(cut, STEPS, file) == weights_of(runs[name].path, STEPS, file), file
    assert losses_of(resumed) == losses_of(runs[name])


def _all_recipes(rank: int, port: int, teacher: Path, folder: Path) -> None:
    with as_rank(rank, 2, port):
        for name in NAMES:
            train(small(name, teacher), folder / name, quiet=True)


@pytest.fixture(scope="session")
def on_two(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of two processes, which train one recipe after the other."""
    folder, port, context = tmp_path_factory.mktemp("two"), _free_port(), multiprocessing.get_context("fork")
    ranks = [context.Process(target=_all_recipes, args=(rank, port, teacher, folder)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(600)
    assert not any(process.exitcode for process in ranks), sorted(folder.iterdir())
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_equal_one(name: str, on_two: Path, runs: dict[str, RunDir]):
    run = RunDir.open(on_two / name)
    assert losses_of(run) == pytest.approx(losses_of(runs[name]), abs=3e-5)
    first, second = (load_file(one.checkpoints()[1] / "model.safetensors") for one in (runs[name], run))
    gaps = torch.cat([(first[key] - second[key]).flatten() for key in first])
    # Adam moves a weight by about lr, and where its gradient is rounding noise by any share of that.
    assert gaps.square().mean().sqrt() < 0.01 * runs[name].recipe().optim.lr
