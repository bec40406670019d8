"""Compiles the Triton kernels for GPUs that this machine does not have.

Kernels are compiled as calls of a codec launch them, with the types, alignments and constants of those calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

__all__ = ["TARGETS", "compile_only"]

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "gfx942": ("hip", "gfx942", 64),
}
"""Backend, architecture and threads per warp of each target."""


@contextmanager
def compile_only(target: str, compiled: Callable[[str, Any, int], None]) -> Iterator[None]:
    """Compile each kernel that is launched inside, and run none of them.

    Use this in a process whose environment lacks ``TRITON_INTERPRET``; see ``process.py``.

    Args:
        target: A key of ``TARGETS``.
        compiled: Receives the name of each kernel, what Triton compiled, and the number of programs, launch by launch.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    from thinwire.codecs.triton import launch

    run = triton.runtime.jit.JITFunction.run

    def compile_kernel(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        compiled(self.__name__, run(self, *args, warmup=True, **kwargs), math.prod(kwargs["grid"]))

    triton.runtime.driver.set_active(_Driver(GPUTarget(*TARGETS[target])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.jit.JITFunction, "run", compile_kernel)
        patch.setattr(launch, "INTERPRETED", True)  # accept CPU tensors
        patch.setattr(launch, "WARP", TARGETS[target][2])
        patch.setattr(launch, "LATEST", 8 if target == "sm_80" else 9)
        launch.generation.cache_clear()
        # The host reads some results of kernels. Zeros are results that it accepts from messages of zeros.
        patch.setattr(torch, "empty", torch.zeros)
        yield


class _Driver:
    """The part of a driver that compilation needs."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        return self.target.arch  # Triton caches compiled kernels by device.

    def get_current_stream(self, device: Any) -> int:
        return 0
