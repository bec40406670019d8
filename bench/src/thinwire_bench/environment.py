"""Where and when a benchmark ran: what a reader needs to judge its numbers."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import thinwire

__all__ = ["describe", "memory_bytes", "num_cores"]

_PACKAGES = ("torch", "numpy", "deepspeed", "torchft")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def describe() -> dict[str, Any]:
    """The machine, the software and the time."""
    versions = {"thinwire": thinwire.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu(),
        "cores": num_cores(),
        "memory_bytes": memory_bytes(),
        "kernel": platform.release(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _cpu() -> str:
    """The processor's name, as Linux tells it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
