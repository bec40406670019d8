"""Jobs of accelerate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from accelerate.state import AcceleratorState, GradientState, PartialState


@contextlib.contextmanager
def job() -> Iterator[None]:
    """Forget the accelerator's state at the end."""
    try:
        yield
    finally:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        PartialState._shared_state.clear()
