"""Tunes the process's allocator for training on CPU."""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_MAX_INT = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next allocation instead of returning it to the kernel.

    Every step allocates and frees the same large buffers. The kernel zeroes each returned page on its next use, which
    costs more than the communication that the page is used for. On CUDA, the caching allocator keeps memory.
    """
    _tune((_MMAP_THRESHOLD, _MAX_INT), (_TRIM_THRESHOLD, _MAX_INT), (_TOP_PAD, 64 << 20), (_ARENA_MAX, 1))


def give_back_freed_memory() -> None:
    """Let glibc return freed buffers to the kernel at once. Buffers for initial values are not reused, and the holes
    that they leave could add up to the size of the model."""
    _tune((_MMAP_THRESHOLD, 1 << 18), (_TRIM_THRESHOLD, 1 << 20), (_TOP_PAD, 1 << 17))


def _tune(*settings: tuple[int, int]) -> None:
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        for key, value in settings:
            mallopt(key, value)
