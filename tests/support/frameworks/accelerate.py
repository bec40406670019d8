"""The environment of accelerate's jobs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState


@contextlib.contextmanager
def job() -> Iterator[None]:
    """Give accelerate the environment that torchrun would, and forget the accelerator's state at the end."""
    os.environ |= {
        "RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_RANK": str(dist.get_rank()), "LOCAL_WORLD_SIZE": str(dist.get_world_size()),
    }  # fmt: skip
    try:
        yield
    finally:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        PartialState._shared_state.clear()
