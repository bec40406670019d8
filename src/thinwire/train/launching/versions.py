"""Versions of the software that a run's results may depend on."""

from __future__ import annotations

import platform
from importlib import metadata

import thinwire

_PACKAGES = ("torch", "numpy", "tokenizers", "transformers", "safetensors", "pydantic")


def versions() -> dict[str, str]:
    """Versions of thinwire, Python, the platform and the relevant installed packages, by name."""
    installed = {
        "thinwire": thinwire.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for package in _PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed
