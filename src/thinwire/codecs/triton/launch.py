"""Connects kernels with torch: devices, alignment, the interpreter."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from thinwire.errors import UsageError

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether TRITON_INTERPRET was set when this backend was imported, which decides how kernels run."""


WARP = 64 if torch.version.hip else 32
"""Threads per warp."""


LATEST: int = 9
"""Generation of NVIDIA's GPUs that kernels are compiled for where there is none."""


def check_device(x: Tensor) -> None:
    """Raise :class:`UsageError` for a tensor on a device where kernels do not run."""
    if x.device.type == "cpu" and not INTERPRETED:
        raise UsageError(
            "the triton backend works on GPU tensors; this one is on cpu "
            "(set TRITON_INTERPRET=1 before starting to run its kernels in the interpreter)"
        )


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, threads: int = 128, **constants: Any) -> None:
    """Run a kernel on the device of its first argument, with a number of threads per program.

    Multiplications and additions are never fused, because messages must have the same bits on every backend.
    """
    device = args[0].device
    # A kernel runs on the current device, which may not be that of the tensors. Integers wrap around silently on a GPU;
    # under the interpreter, numpy would warn.
    context = torch.cuda.device(device) if device.type == "cuda" else np.errstate(all="ignore")
    with context if INTERPRETED or device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](*args, **constants, num_warps=max(threads // WARP, 1), enable_fp_fusion=False)


@cache
def generation(device: torch.device) -> int:
    """The major number of an NVIDIA GPU's compute capability; that of the latest for other devices."""
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device)[0]
    return LATEST


def aligned(wire: Tensor) -> Tensor:
    """Return a message at an address that is a multiple of 16, because kernels read and write words of any width.

    A message at another address is copied.
    """
    return wire if wire.data_ptr() % 16 == 0 else wire.clone()


def room_for(wire: Tensor, nbytes: int) -> Tensor:
    """Memory for a message of ``nbytes`` bytes: the start of ``wire``, or other memory at an aligned address, from
    which the caller copies the message."""
    return wire[:nbytes] if wire.data_ptr() % 16 == 0 else wire.new_empty(nbytes)


def aligned_rows(wires: Tensor, nbytes: int) -> Tensor:
    """The first ``nbytes`` bytes of every row, copied unless all rows are aligned as in :func:`aligned`."""
    if len(wires) == 1:
        # A single row has no next row, so its stride may have any value.
        return aligned(wires[0, :nbytes]).view(1, -1)
    if wires.data_ptr() % 16 == 0 and wires.stride(0) % 16 == 0:
        return wires[:, :nbytes]
    rows = wires.new_empty(len(wires), ceil_div(nbytes, 16) * 16)[:, :nbytes]
    return rows.copy_(wires[:, :nbytes])


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()
