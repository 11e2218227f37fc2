"""What a run was made with: versions of the packages that decide its numbers, and the machine."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import statewise

PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "peft", "datasets", "safetensors", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python, statewise and the packages in PACKAGES; those not installed are left out."""
    found = {"python": platform.python_version(), "statewise": statewise.__version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """CPU model, cores that this process may use, memory in GiB, and, where torch is loaded, its threads and GPUs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts: dict[str, Any] = {"system": platform.platform(), "cpu": _cpu_model(), "cores": cores, "memory_gib": _gib()}
    torch = sys.modules.get("torch")
    if torch is not None:
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
        facts |= {"torch_threads": torch.get_num_threads(), "gpus": [torch.cuda.get_device_name(i) for i in gpus]}
    return facts


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None
