"""Which module of ours belongs to the release of torchtitan that is installed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Final

from thinwire.errors import UsageError

__all__ = ["wrong_release"]

_MODULES: Final[Mapping[str, str]] = {
    "0.2": "thinwire.integrations.torchtitan_v02",
    "0.3": "thinwire.integrations.torchtitan",
}
"""Releases of torchtitan, and the module for each. Their configurations have nothing in common."""


def wrong_release(module: str) -> Exception:
    """The exception for a module of ours that cannot import what it needs of torchtitan.

    Args:
        module: The module.

    Returns:
        A ``UsageError`` that names the module for the installed release, or an ``ImportError`` without torchtitan.
    """
    try:
        installed = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        return ImportError(f"{module} needs torchtitan, not installed here: pip install 'thinwire[torchtitan]'")
    other = next((name for release, name in _MODULES.items() if installed.startswith(f"{release}.")), None)
    remedy = f"import from {other}" if other else f"install {' or '.join(f'{release}.*' for release in _MODULES)}"
    return UsageError(f"{module} is not for torchtitan {installed}: {remedy}")
