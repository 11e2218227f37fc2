"""Atomic writing and strict JSON."""

import errno
import json
import math
import multiprocessing
import os
import signal
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from statewise import files


def test_atomic_write_replaces_and_keeps_on_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f"
    files.atomic_write(file, "old é")
    assert file.read_text(encoding="utf-8") == "old é"

    def fails(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", fails)
    with pytest.raises(OSError, match="disk full"):
        files.atomic_write(file, b"new")
    assert file.read_text(encoding="utf-8") == "old é" and list(tmp_path.iterdir()) == [file]


def test_errors_of_writing_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk has no name in the system's error, a directory in the way has the temporary file's."""
    (tmp_path / "directory").mkdir()
    with pytest.raises(IsADirectoryError) as wrong:
        files.atomic_write(tmp_path / "directory", "x")
    assert wrong.value.filename == str(tmp_path / "directory")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError) as wrong, files.written_aside(tmp_path / "f") as aside:
        aside.write_text("x")
    assert (wrong.value.errno, wrong.value.filename) == (errno.ENOSPC, str(tmp_path / "f"))
    with pytest.raises(FileNotFoundError) as wrong, files.written_aside(tmp_path / "f"):
        (tmp_path / "input").read_text()
    assert wrong.value.filename == str(tmp_path / "input")
    assert [p.name for p in tmp_path.iterdir()] == ["directory"]


def test_errors_of_rust_libraries_are_the_system_s(tmp_path: Path) -> None:
    with pytest.raises(OSError) as wrong, files.naming(tmp_path / "f"):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert (wrong.value.errno, wrong.value.filename) == (errno.ENOSPC, str(tmp_path / "f"))
    with pytest.raises(RuntimeError, match="other"), files.naming(tmp_path / "f"):
        raise RuntimeError("other")


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.atomic_write(tmp_path / "f", "x")
        (tmp_path / "d" / "e").mkdir(parents=True)
        save_file({"w": np.ones(2)}, tmp_path / "d" / "e" / "w.safetensors")  # for the owner alone
        files.open_to_others(tmp_path / "d")
    finally:
        os.umask(before)
    written = (tmp_path / "f", tmp_path / "d" / "e" / "w.safetensors")
    assert [stat.S_IMODE(path.stat().st_mode) for path in written] == [0o640, 0o640]


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    assert files.sha256(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_plain_values_round_trip(value: object) -> None:
    assert json.loads(files.to_json(value)) == value


def test_half_a_surrogate_pair_is_escaped() -> None:
    told = files.to_json({"text": "é\ud800"})
    assert told == '{"text": "é\\ud800"}' and json.loads(told) == {"text": "é\ud800"}


def test_other_values_become_plain() -> None:
    value = {1: np.float32(0.5), "n": np.int64(3), "x": [math.inf, (Path("p"),)], "s": {2}, "nan": np.float64("nan")}
    assert files.plain(value) == {"1": 0.5, "n": 3, "x": [None, ["p"]], "s": [2], "nan": None}
    with pytest.raises(TypeError):
        files.to_json(object())


def _kill_while_writing(path: Path) -> None:
    with files.written_aside(path) as aside:
        aside.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_writer_left_goes_and_what_is_being_written_stays(tmp_path: Path):
    path, other = tmp_path / "rows[1].json", tmp_path / "others.json"
    for target in (path, other):
        process = multiprocessing.get_context("fork").Process(target=_kill_while_writing, args=(target,))
        process.start()
        process.join()
    (mine,) = tmp_path.glob(".rows*.tmp")
    with files.written_aside(path) as beside:
        beside.write_bytes(b"slow")
        files.atomic_write(path, "quick")
        assert beside.read_bytes() == b"slow" and not mine.exists()
    assert path.read_bytes() == b"slow"
    assert [file.name.split(".")[1] for file in tmp_path.glob(".*.tmp")] == ["others"]


def test_a_directory_with_leftovers_alone_is_unused(tmp_path: Path):
    out = tmp_path / "out"
    assert files.is_unused(out)
    (out / "parts").mkdir(parents=True)
    (out / "parts" / ".key.0123456789ab.tmp").touch()
    assert files.is_unused(out)
    for name in (".hidden", "parts/key", ".key.tmp"):
        (out / name).touch()
        assert not files.is_unused(out), name
        (out / name).unlink()
    assert not files.is_unused(Path(__file__))
