"""Where and when a benchmark ran: what a reader needs to judge its numbers."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import thinwire
from thinwire.train.environment import num_cores

_PACKAGES = ("torch", "numpy", "deepspeed", "torchft")


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those of these packages that are installed."""
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def describe() -> dict[str, Any]:
    """The machine, the software and the time."""
    own = {"thinwire": thinwire.__version__, "python": platform.python_version()}
    return {
        "cpu": _cpu(),
        "cores": num_cores(),
        "memory_bytes": memory_bytes(),
        "kernel": platform.release(),
        "versions": own | installed(_PACKAGES),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _cpu() -> str:
    """The processor's name, as Linux tells it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
