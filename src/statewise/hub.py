"""The Hugging Face hub, where it may be out of reach: known within seconds, not after minutes of retries."""

from __future__ import annotations

import os
import socket
import sys
from functools import cache
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies

SECONDS = 3.0  # for a name to be found and a connection to stand
TRUE = ("1", "ON", "YES", "TRUE")


def prepare_hub(name: str) -> None:
    """Before something is read by its hub id: where the hub can't be reached, libraries look on this machine only.

    That is said once, on stderr. The environment's HF_HUB_OFFLINE, HF_ENDPOINT and proxies count.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in TRUE or getproxies():
        return
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    problem = _problem(address)
    if problem is None:
        return
    host = urlsplit(address).hostname
    print(
        f"{host} can't be reached ({problem}): '{name}' and other hub ids are looked for on this machine only. "
        "HF_HUB_OFFLINE=1 says so from the start.",
        file=sys.stderr,
        flush=True,
    )
    os.environ["HF_HUB_OFFLINE"] = "1"  # for child processes, and for libraries that are not loaded yet
    for module, flag in (("huggingface_hub.constants", "HF_HUB_OFFLINE"), ("datasets.config", "HF_HUB_OFFLINE")):
        if module in sys.modules:
            setattr(sys.modules[module], flag, True)


@cache
def _problem(address: str) -> str | None:
    """Why nothing listens at the address; None where something does."""
    parts = urlsplit(address)
    found: list[str | None] = []

    def connect() -> None:
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname or "", port), SECONDS).close()
            found.append(None)
        except (OSError, ValueError) as error:
            found.append(getattr(error, "strerror", None) or str(error))

    # In a thread: looking up a name has no time limit of its own.
    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(2 * SECONDS)
    return found[0] if found else f"no answer within {2 * SECONDS:g} s"
