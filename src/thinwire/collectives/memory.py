"""Memory for communication. All such buffers are allocated here, so that symmetric memory or registration with the
network card can be added in one place.

On CUDA, the caching allocator reuses freed memory. On CPU there is no such allocator, and malloc spends time on large
blocks that are allocated and freed in every step. So blocks are kept here and reused once nothing refers to them. Some
buffers differ in size from step to step; blocks therefore have few sizes, eight between a power of two and the next.
"""

from __future__ import annotations

import threading

import torch

SMALLEST = 64 << 10
"""Smallest size in bytes of a block that is kept; malloc is fast for smaller ones."""

_lock = threading.Lock()
_blocks: dict[int, list[torch.UntypedStorage]] = {}


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate an uninitialised 1-D buffer. It is free again once no tensor shares its storage."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # lanes write to the buffer outside the caller's inference mode
            return allocate(numel, dtype, device)
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes < SMALLEST:
        return torch.empty(numel, dtype=dtype, device=device)
    unit = 1 << (nbytes.bit_length() - 4)
    nbytes = (nbytes + unit - 1) // unit * unit
    with _lock:
        kept = _blocks.setdefault(nbytes, [])
        block = next((block for block in kept if _unused(block)), None)
        if block is None:
            block = torch.UntypedStorage(nbytes, device="cpu")
            kept.append(block)
        return torch.empty(0, dtype=dtype, device="cpu").set_(block, 0, (numel,), (1,))


def release_memory() -> None:
    """Release all blocks that are not in use."""
    with _lock:
        for nbytes, kept in list(_blocks.items()):
            _blocks[nbytes] = [block for block in kept if not _unused(block)]


def _unused(block: torch.UntypedStorage) -> bool:
    """Whether the list of blocks holds the only reference to the block's memory."""
    return torch._C._storage_Use_Count(block._cdata) == 1
