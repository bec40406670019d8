"""What the process's allocator must know of training on CPU."""

from __future__ import annotations

import ctypes
import platform

__all__ = ["give_back_freed_memory", "keep_freed_memory"]

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_MAX_INT = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next allocation instead of giving it back to the kernel.

    A step allocates and frees the same large buffers every time; given back, each page is zeroed by the kernel when it
    is touched again, which costs more than the communication it holds. On CUDA the caching allocator does this.

    Returns:
        Whether it took effect (glibc only).
    """
    return _tune((_MMAP_THRESHOLD, _MAX_INT), (_TRIM_THRESHOLD, _MAX_INT), (_TOP_PAD, 64 << 20), (_ARENA_MAX, 1))


def give_back_freed_memory() -> bool:
    """Let glibc give freed buffers back to the kernel at once: those that initial values need are not needed again, and
    holes between what stays would add up to as much as the model.

    Returns:
        Whether it took effect (glibc only).
    """
    return _tune((_MMAP_THRESHOLD, 1 << 18), (_TRIM_THRESHOLD, 1 << 20), (_TOP_PAD, 1 << 17))


def _tune(*settings: tuple[int, int]) -> bool:
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    taken = [mallopt(key, value) == 1 for key, value in settings]  # each one, whatever became of the others
    return all(taken)
