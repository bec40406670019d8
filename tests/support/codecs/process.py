"""A process of its own, for tests that import Triton in another way than the rest of the tests."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

__all__ = ["own_process"]


@contextmanager
def own_process(**environment: str | None) -> Iterator[Callable[..., Any]]:
    """Calls functions in another process, one after the other, and returns what they return or raises what they raise.
    Warnings are errors there, as they are here.

    Args:
        environment: variables that are set there, or not set if None.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=warnings.simplefilter, initargs=("error",)) as pool:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                if value is None:
                    patch.delenv(name, raising=False)
                else:
                    patch.setenv(name, value)
            pool.submit(os.getpid).result()  # the process starts, and takes the environment as it is
        yield lambda function, *args: pool.submit(function, *args).result()
