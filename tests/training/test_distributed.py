"""Two processes (gloo) give the same losses and weights as one."""

import multiprocessing
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.training.conftest import losses_of

from statewise.errors import RunError
from statewise.recipe import Recipe
from statewise.run import RunDir


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def as_rank(rank: int, world: int, port: int) -> Iterator[None]:
    """This forked process as one of `world` that torchrun would have started."""
    from accelerate.state import AcceleratorState

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    torch.distributed.destroy_process_group()


def _rank(rank: int, world: int, port: int, plain: dict[str, Any], run: str) -> None:
    with as_rank(rank, world, port):
        from statewise import train

        train(Recipe.from_plain(plain, name="small"), run, quiet=True)


def _shard_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """accelerate turns FSDP on for accelerators only; gloo can shard too, so its state is set to what a GPU would give."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    from statewise.training import loop

    original = loop.open_accelerator

    def sharded() -> Any:
        accelerator = original()
        if accelerator.num_processes > 1:
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type="FULL_STATE_DICT"
            )
            accelerator.state.__dict__.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
        return accelerator

    patch.setattr(loop, "open_accelerator", sharded)


def run_on(world: int, plain: dict[str, Any], run: Path) -> RunDir:
    """The recipe trained by `world` forked processes."""
    codes = exit_codes(_rank, world, plain, str(run))
    if any(codes):
        raise RuntimeError(f"exit codes {codes}: {RunDir.open(run).info['error']}")
    return RunDir.open(run)


def exit_codes(target: Any, world: int, *args: Any) -> list[int | None]:
    """Of `target(rank, world, port, *args)` in `world` forked processes; None of one that hangs."""
    port, context = _free_port(), multiprocessing.get_context("fork")
    ranks = [context.Process(target=target, args=(r, world, port, *args)) for r in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(180)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    return codes


VARIANTS: dict[str, dict[str, Any]] = {
    "idft": {},
    "seven rollouts, so that the ranks differ": {"batch": {"rollouts": 7, "micro_rows": 2}},
    "one rollout, so that a rank has none": {"batch": {"rollouts": 1}},
    "lora with a reference": {
        "model": {"adapter": {"rank": 4}},
        "signal": ["gold", "reference"],
        "objective": [{"loss": "nll", "weight": "probability"}, {"loss": "reference_kl", "coef": 0.1}],
    },
    "two updates a step against the policy of its start": {
        "signal": ["gold", "behavior"],
        "objective": [{"loss": {"kind": "clip", "advantage": 1.0}, "reduce": "sequence_mean_token_mean"}],
        "batch": {"rollouts": 8, "minibatches": 2},
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_two_processes_equal_one(name: str, plain: dict[str, Any], tmp_path: Path):
    changes = VARIANTS[name]
    plain = {**plain, **changes, "model": {**plain["model"], **changes.get("model", {})}}
    same(run_on(1, plain, tmp_path / "one"), run_on(2, plain, tmp_path / "two"))


def _refused(rank: int, world: int, port: int, plain: dict[str, Any], run: str, resume: bool) -> None:
    from statewise import train

    told = Path(f"{run}.rank{rank}")
    with as_rank(rank, world, port):
        try:
            train(Recipe.from_plain(plain, name="small"), run, resume=resume, quiet=True)
        except RunError as error:
            told.write_text(str(error))


@pytest.mark.parametrize(
    ("resume", "message"), [(True, "gives other samples than when the run began"), (False, "holds a run")]
)
def test_a_refusal_of_rank_0_is_told_by_all(plain: dict[str, Any], tmp_path: Path, resume: bool, message: str):
    """Nobody waits for a rank that has given up."""
    data, run = tmp_path / "data.jsonl", tmp_path / "run"
    data.write_text('{"prompt": "1 + 1", "completion": "2"}\n')
    plain |= {"source": {"kind": "dataset", "data": str(data)}, "budget": {"max_steps": 1}}
    run_on(1, plain, run)
    data.write_text('{"prompt": "1 + 1", "completion": "3"}\n')
    assert exit_codes(_refused, 2, plain, str(run), resume) == [0, 0]
    first, second = (Path(f"{run}.rank{rank}").read_text() for rank in (0, 1))
    assert first == second and message in first


def test_two_sharded_processes_equal_one(plain: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _shard_on_cpu(monkeypatch)
    same(run_on(1, plain, tmp_path / "one"), run_on(2, plain, tmp_path / "two"))
    # That parameters are sharded shows in the refusal to evaluate them inside the run.
    with pytest.raises(RuntimeError, match="sharded"):
        run_on(2, {**plain, "eval": {"tasks": ["tiny:text"]}}, tmp_path / "evaluated")


def same(one: RunDir, two: RunDir) -> None:
    """Losses, metrics and final weights agree to 1e-5."""
    assert losses_of(two) == pytest.approx(losses_of(one), abs=1e-5)
    for column in ("nll", "grad_norm", "total_tokens"):
        a, b = ([r[column] for r in run.metrics() if column in r] for run in (one, two))
        assert b == pytest.approx(a, abs=1e-4), column
    (file,) = [f.name for f in one.checkpoints()[6].glob("*model.safetensors")]
    first, second = (load_file(run.checkpoints()[6] / file) for run in (one, two))
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert torch.allclose(value, second[key], atol=1e-5), key
