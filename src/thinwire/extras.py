"""The extras of an installation: the libraries that each one brings, and the sentence for a missing one."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Final

from thinwire.errors import UsageError

EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "train": ("matplotlib", "pyarrow", "tensorboard", "tokenizers"),
    "lightning": ("lightning",),
    "report": ("jinja2", "matplotlib"),
    "transformers": ("accelerate", "transformers"),
    "islands": ("torchft",),
    "bench": ("jinja2", "matplotlib", "pyarrow", "tensorboard", "tokenizers"),
}
"""Importable modules that each extra of ``pyproject.toml`` brings."""


def extra_of(module: str) -> str | None:
    """The extra that brings a module, for example ``matplotlib.pyplot``; ``None`` if none does."""
    top = module.partition(".")[0]
    # The smallest extra is the cheapest remedy.
    bringing = [extra for extra, modules in EXTRAS.items() if top in modules]
    return min(bringing, key=lambda extra: len(EXTRAS[extra]), default=None)


def missing_sentence(what: str, modules: tuple[str, ...], extra: str) -> str:
    """Which libraries a command or feature misses, and how to install them: by the extra that brings them."""
    return f"{what} needs {', '.join(modules)}, not installed here: pip install 'thinwire[{extra}]'"


def require(extra: str, what: str) -> None:
    """Check that every library of an extra, a key of :data:`EXTRAS`, is installed for a command or feature, without
    importing any.

    Raises:
        UsageError: naming the missing libraries and the extra that brings them.
    """
    missing = tuple(module for module in EXTRAS[extra] if importlib.util.find_spec(module) is None)
    if missing:
        raise UsageError(missing_sentence(what, missing, extra))
