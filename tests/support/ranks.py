"""Tests that every rank of a job runs."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from _pytest.assertion import install_importhook
from _pytest.assertion.rewrite import AssertionRewritingHook
from _pytest.config import get_config

from thinwire.testing import run_ranks

Test = Callable[..., None]


def on_ranks(world: int | str, *, timeout: float = 120.0) -> Callable[[Test], Test]:
    """Let every rank of a job call a test, with the arguments that pytest gives it.

    Args:
        world: Number of ranks, or the name of the argument that says it.
        timeout: Seconds until the ranks are killed.
    """

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def start(*given: Any, **named: Any) -> None:
            arguments = inspect.signature(test).bind(*given, **named).arguments
            ranks = arguments[world] if isinstance(world, str) else world
            run_ranks(ranks, _call, test.__module__, test.__name__, arguments, timeout=timeout)

        return start

    return decorate


def _call(module: str, name: str, arguments: dict[str, Any]) -> None:
    """Find a test by its name, which its module has given to what starts it, and call it."""
    if not any(isinstance(finder, AssertionRewritingHook) for finder in sys.meta_path):
        # As in pytest's own process, an assert that fails tells its values.
        install_importhook(get_config())._must_rewrite.add("tests")
    inspect.unwrap(getattr(importlib.import_module(module), name))(**arguments)
