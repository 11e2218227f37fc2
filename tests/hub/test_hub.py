"""A hub that can't be reached is known at once, and only once asked."""

import socket
import time
from collections.abc import Iterator

import pytest

from statewise import hub
from statewise.errors import DataError
from statewise.models.load import load_policy, load_tokenizer
from statewise.settings import ModelSettings


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine that is not told to be offline; the libraries' own flags are put back afterwards."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    clear = hub._problem.cache_clear
    clear()
    yield
    clear()


def test_out_of_reach(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    for load in (load_policy, load_tokenizer):
        with pytest.raises(DataError, match="nobody/nothing"):
            load(ModelSettings(path="nobody/nothing"))
    assert time.monotonic() - began < 20, "the libraries' own retries take longer"
    said = capsys.readouterr().err
    assert said.count("127.0.0.1 can't be reached (Connection refused): 'nobody/nothing'") == 1 and "Retry" not in said
    assert constants.is_offline_mode()


def test_in_reach_nothing_changes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import huggingface_hub.constants as constants

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        hub.prepare_hub("some/model")
    assert not constants.HF_HUB_OFFLINE and capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "HF_HUB_OFFLINE"])
def test_who_says_how_to_connect_is_believed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(name, "http://proxy:3128" if name == "HTTPS_PROXY" else "1")
    hub.prepare_hub("some/model")
    assert capsys.readouterr().err == ""


def test_local_names_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_problem", lambda address: pytest.fail("asked the hub"))
    load_tokenizer(ModelSettings(path="tiny"))
