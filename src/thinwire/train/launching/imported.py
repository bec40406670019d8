"""What every rank imports, imported once: the server that ranks are forked from loads this module."""

from __future__ import annotations

import atexit
import gc

gc.disable()  # everything that is made here stays

# The first optimizer of a process imports Dynamo.
import torch._dynamo  # noqa: E402

import thinwire.train.worker  # noqa: E402

__all__ = ["thinwire", "torch"]

# A collection in a rank would write to every page that holds an object, and so get a copy of it.
gc.freeze()
gc.enable()
atexit.register(gc.unfreeze)  # or libraries complain that objects are left
