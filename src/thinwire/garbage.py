"""Collections of garbage, where they take longer than what they find is worth."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Leave garbage where it is in this block or call, for code that makes many objects to keep.

    Every collection looks at all objects there are, and torch's imports alone make hundreds of thousands.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
