"""Checkpoints survive every way of being cut short, and what is read back is what was written."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from statewise.errors import CheckpointError
from statewise.training import checkpoint


def write_weights(value: float):
    def write(path: Path) -> None:
        save_file({"w": torch.full((64,), value)}, path / "model.safetensors")
        (path / "nested").mkdir()
        (path / "nested" / "config.json").write_text("{}")

    return write


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the checkpoints 10, 20 and 30."""
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, step, write=write_weights(step), state={"step": step, "seconds": 0.1 * step})
    return tmp_path


def newest(run: Path) -> tuple[Path | None, list[str]]:
    said: list[str] = []
    return checkpoint.latest_valid(run, said.append), said


def test_saved_is_read_back(run: Path) -> None:
    path, said = newest(run)
    assert path == run / "checkpoints" / "step_000030" and said == []
    assert checkpoint.load_state(path) == {"step": 30, "seconds": 3.0}
    assert torch.equal(load_file(path / "model.safetensors")["w"], torch.full((64,), 30.0))
    assert len({file.stat().st_mode for file in path.rglob("*") if file.is_file()}) == 1, "readable by the same users"
    listed = json.loads((path / "manifest.json").read_text())["files"]
    assert set(listed) == {"model.safetensors", "nested/config.json", "trainer.json"}


def test_a_full_disk_is_told_and_leaves_nothing(run: Path) -> None:
    def write(path: Path) -> None:
        write_weights(40.0)(path)
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")  # safetensors

    with pytest.raises(OSError, match="No space left") as wrong:
        checkpoint.save(run, 40, write=write, state={})
    assert wrong.value.filename == str(run / "checkpoints" / "step_000040")
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step_000010", "step_000020", "step_000030"]


def test_no_checkpoint(tmp_path: Path) -> None:
    assert newest(tmp_path) == (None, [])


def flip_a_byte(path: Path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)


def cut_short(path: Path) -> None:
    os.truncate(path / "model.safetensors", 100)


DAMAGES = {
    "flipped byte": (flip_a_byte, "SHA-256 differs"),
    "truncated file": (cut_short, "has 100 bytes, expected"),
    "missing file": (lambda p: (p / "nested" / "config.json").unlink(), "nested/config.json can't be read"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "torn manifest": (lambda p: os.truncate(p / "manifest.json", 30), "manifest.json can't be read"),
    "manifest of another shape": (lambda p: (p / "manifest.json").write_text("[1]"), "manifest.json can't be read"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoint_is_named_and_the_one_before_used(run: Path, name: str) -> None:
    damage, words = DAMAGES[name]
    damage(run / "checkpoints" / "step_000030")
    path, said = newest(run)
    assert path == run / "checkpoints" / "step_000020"
    assert len(said) == 1 and "step 30" in said[0] and words in said[0] and "the one before" in said[0]


def test_all_damaged(run: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        flip_a_byte(path)
    path, said = newest(run)
    assert path is None and [f"step {s}" in text for s, text in zip((30, 20, 10), said, strict=True)] == [True] * 3


def test_a_write_that_dies_leaves_the_previous_one(run: Path) -> None:
    def dies(path: Path) -> None:
        (path / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(run, 40, write=dies, state={})
    assert not (run / "checkpoints" / "step_000040").exists()
    path, said = newest(run)
    assert path is not None and path.name == "step_000030"
    assert said == [] and len(list((run / "checkpoints").glob(".tmp_*"))) == 1  # who only reads leaves it to the writer
    checkpoint.clear(run, said.append)
    assert len(said) == 1 and ".tmp_step_000040" in said[0]
    assert not list((run / "checkpoints").glob(".tmp_*"))
    checkpoint.save(run, 40, write=write_weights(40), state={})
    assert newest(run)[0] == run / "checkpoints" / "step_000040"


def test_the_rename_is_the_last_thing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the moment of the rename every file, the manifest too, is complete."""
    seen: list[list[str]] = []
    real = os.replace

    def watched(source: Path, target: Path) -> None:
        seen.append(checkpoint.verify(Path(source)))
        real(source, target)

    monkeypatch.setattr(checkpoint.os, "replace", watched)
    checkpoint.save(run, 50, write=write_weights(50), state={})
    assert seen == [[]]


def test_saving_a_step_again(run: Path) -> None:
    """A valid one stays; a damaged one is written anew."""
    path = checkpoint.save(run, 30, write=write_weights(99), state={})
    assert float(load_file(path / "model.safetensors")["w"][0]) == 30
    flip_a_byte(path)
    checkpoint.save(run, 30, write=write_weights(99), state={})
    assert checkpoint.verify(path) == [] and float(load_file(path / "model.safetensors")["w"][0]) == 99


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "keep", "left"),
    [(1, None, (), [30]), (2, None, {10}, [10, 20, 30]), (1, 10, (), [10, 20, 30]), (1, 20, (), [20, 30])],
)
def test_prune(run: Path, keep_last: int, keep_every: int | None, keep: set[int], left: list[int]) -> None:
    checkpoint.prune(run, keep_last, keep_every, keep)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [f"step_{s:06d}" for s in left]


def test_state_that_is_no_state(run: Path) -> None:
    path = run / "checkpoints" / "step_000010"
    (path / "trainer.json").write_text("3")
    with pytest.raises(CheckpointError, match=r"trainer\.json"):
        checkpoint.load_state(path)


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


TENSORS = st.sampled_from(
    [
        torch.tensor(7.0),
        torch.tensor([1, 2], dtype=torch.int64),
        torch.randn(3, 4).bfloat16(),
        torch.randn(2, 3).t(),
        torch.zeros(0),
        torch.tensor([True, False]),
        torch.randn(2, dtype=torch.float64),
    ]
)
LEAVES = TENSORS | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
KEYS = st.text("ab/#", max_size=4) | st.integers(0, 3)
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=12,
)


@given(NESTED)
@settings(max_examples=60, deadline=None)
def test_tensors_round_trip(tmp_path_factory: pytest.TempPathFactory, nested: object) -> None:
    file = tmp_path_factory.mktemp("nested") / "state.safetensors"
    checkpoint.save_tensors(file, nested)
    assert same(checkpoint.load_tensors(file), nested)


def test_shared_tensors_are_stored_twice_and_not_aliased(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    checkpoint.save_tensors(tmp_path / "s", {"whole": base, "tied": base, "part": base[2:4]})
    back = checkpoint.load_tensors(tmp_path / "s")
    back["tied"].zero_()
    assert torch.equal(back["whole"], base) and torch.equal(back["part"], base[2:4])


def test_optimizer_state_round_trip(tmp_path: Path) -> None:
    """An optimizer that got its state back goes on with the same bytes."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.99))
        for step in range(steps):
            advance(model, optimizer, step)
        return model, optimizer

    def advance(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        torch.manual_seed(step)
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = trained(3)
    checkpoint.save_tensors(tmp_path / "optimizer", get_optimizer_state_dict(model, optimizer))
    other = torch.nn.Linear(4, 4)
    other.load_state_dict(model.state_dict())
    restored = torch.optim.AdamW(other.parameters(), lr=0.5)
    set_optimizer_state_dict(other, restored, checkpoint.load_tensors(tmp_path / "optimizer"))
    advance(other, restored, 3)
    expected, _ = trained(4)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), expected.parameters(), strict=True))


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"object at '/a/1'"):
        checkpoint.save_tensors(tmp_path / "s", {"a": [1, object()]})
    with pytest.raises(CheckpointError, match="key 1.5"):
        checkpoint.save_tensors(tmp_path / "s", {1.5: 1})


def test_not_a_tensor_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"nonsense")
    save_file({"w": torch.zeros(1)}, tmp_path / "y")
    for name in ("x", "y", "missing"):
        with pytest.raises(CheckpointError, match="save_tensors"):
            checkpoint.load_tensors(tmp_path / name)
