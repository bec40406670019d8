"""Jobs of accelerate, and their accelerators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from thinwire.integrations.accelerate import ThinwireAccelerator


def accelerator_of(plan: str | None, **options: Any) -> Any:
    """Of accelerate itself, or over a plan."""
    if plan is None:
        return Accelerator(cpu=True, **options)
    return ThinwireAccelerator(cpu=True, plan=plan, **options)


@contextlib.contextmanager
def job() -> Iterator[None]:
    """Forget the accelerator's state at the end."""
    try:
        yield
    finally:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        PartialState._shared_state.clear()
