"""Memory for communication. Every such buffer comes from here, so that symmetric memory or registration with the
network card has one place to go.

On CUDA the caching allocator hands out what was freed before. On CPU there is none, and large blocks that malloc gives
and takes every step cost time in its own bookkeeping; so blocks are kept here and reused once nobody holds them.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["allocate", "release_memory"]

SMALLEST = 64 << 10
"""Bytes from which a block is kept; malloc is good at small ones."""

_lock = threading.Lock()
_blocks: dict[int, list[torch.UntypedStorage]] = {}


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised 1-D communication buffer. It is free again when no tensor that shares its storage is left."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # lanes write to it outside of the caller's inference mode
            return allocate(numel, dtype, device)
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes < SMALLEST:
        return torch.empty(numel, dtype=dtype, device=device)
    with _lock:
        kept = _blocks.setdefault(nbytes, [])
        block = next((block for block in kept if _unused(block)), None)
        if block is None:
            block = torch.UntypedStorage(nbytes, device="cpu")
            kept.append(block)
        return torch.empty(0, dtype=dtype).set_(block, 0, (numel,), (1,))


def release_memory() -> None:
    """Let go of every block that nobody holds."""
    with _lock:
        for nbytes, kept in list(_blocks.items()):
            _blocks[nbytes] = [block for block in kept if not _unused(block)]


def _unused(block: torch.UntypedStorage) -> bool:
    """Whether the list of blocks holds the only reference to its memory."""
    return torch._C._storage_Use_Count(block._cdata) == 1
