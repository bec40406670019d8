"""Steps of several micro-batches, in loops that say beforehand whether ranks combine gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from thinwire.sharding.runtime.runtime import runtime_of

__all__ = ["begin_micro_batch", "without_sync"]


def begin_micro_batch(model: nn.Module, *, last: bool) -> None:
    """Begin a micro-batch of a sharded model; ranks combine gradients in the last one of a step."""
    runtime = runtime_of(model)
    runtime.begin_micro_batch(runtime.backwards, last=last)


@contextmanager
def without_sync(model: nn.Module) -> Iterator[None]:
    """Combine no gradients in the backward inside: more micro-batches of the step follow."""
    begin_micro_batch(model, last=False)
    try:
        yield
    finally:
        begin_micro_batch(model, last=True)
