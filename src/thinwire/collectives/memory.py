"""Memory for communication. All such buffers are allocated here, so that symmetric memory or registration with the
network card can be added in one place.

On CUDA, the caching allocator reuses freed memory. On CPU there is no such allocator, and malloc spends time on large
blocks that are allocated and freed in every step. So blocks are kept here and reused once nothing refers to them. Some
buffers differ in size from step to step; a block therefore serves those that are up to an eighth smaller, too, and
replaces one that is a little too small.
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
    with _lock:
        block = _kept(nbytes)
        if block is None:
            block = torch.UntypedStorage(nbytes, device="cpu")
            _blocks.setdefault(nbytes, []).append(block)
        return torch.empty(0, dtype=dtype, device="cpu").set_(block, 0, (numel,), (1,))


def _kept(nbytes: int) -> torch.UntypedStorage | None:
    """An unused block of this size, or of up to an eighth more. Without one, a block of up to an eighth less is
    dropped."""
    if (block := _first_unused(nbytes)) is not None:
        return block
    near = sorted(size for size in _blocks if 8 * abs(size - nbytes) <= nbytes)
    for size in (*(size for size in near if size > nbytes), *(size for size in near if size < nbytes)):
        if (block := _first_unused(size)) is not None:
            if size > nbytes:
                return block
            _blocks[size].remove(block)
            return None
    return None


def _first_unused(nbytes: int) -> torch.UntypedStorage | None:
    return next((block for block in _blocks.get(nbytes, ()) if _unused(block)), None)


def release_memory() -> None:
    """Release all blocks that are not in use."""
    with _lock:
        for nbytes, kept in list(_blocks.items()):
            _blocks[nbytes] = [block for block in kept if not _unused(block)]


def _unused(block: torch.UntypedStorage) -> bool:
    """Whether the list of blocks holds the only reference to the block's memory."""
    return torch._C._storage_Use_Count(block._cdata) == 1


def stored_once(tensor: torch.Tensor, expanded: torch.Tensor | None = None) -> torch.Tensor:
    """What an expanded tensor stores, of which no element is written twice; or that part of a tensor of its shape."""
    for dim, stride in reversed(list(enumerate((tensor if expanded is None else expanded).stride()))):
        if stride == 0 and tensor.shape[dim]:
            tensor = tensor.select(dim, 0)
    return tensor
