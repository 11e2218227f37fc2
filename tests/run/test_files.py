"""Atomic writing and strict JSON."""

import json
import math
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.atomic_write(tmp_path / "f", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o640


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


def test_other_values_become_plain() -> None:
    value = {1: np.float32(0.5), "n": np.int64(3), "x": [math.inf, (Path("p"),)], "s": {2}, "nan": np.float64("nan")}
    assert files.plain(value) == {"1": 0.5, "n": 3, "x": [None, ["p"]], "s": [2], "nan": None}
    with pytest.raises(TypeError):
        files.to_json(object())
