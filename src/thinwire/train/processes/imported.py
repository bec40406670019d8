"""What every rank imports, imported once: the server that ranks are forked from loads this module."""

from __future__ import annotations

import atexit
import gc
import os

gc.disable()  # everything that is made here stays

# The first optimizer of a process imports Dynamo.
import torch._dynamo  # noqa: E402

import thinwire.train.processes.worker  # noqa: E402

__all__ = ["thinwire", "torch"]

# A collection in a rank would write to every page that holds an object, and so get a copy of it.
gc.freeze()
gc.enable()

_server = os.getpid()


def _leave() -> None:
    """End the server without taking apart what it has imported, which would take as long as a step."""
    if os.getpid() == _server:
        os._exit(0)


atexit.register(_leave)
