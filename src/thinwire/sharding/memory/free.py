"""The memory that is free on a rank's device."""

from __future__ import annotations

import functools
import uuid
from pathlib import Path

import torch


def free_memory(device: torch.device) -> tuple[str, int]:
    """Whose memory a rank with this device allocates, and how much of it is free.

    Returns:
        A name that ranks of the same memory have in common, and the bytes that are free for all of them together.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return str(torch.cuda.get_device_properties(device).uuid), free + unused
    import psutil  # which a training without generation does not need

    return _machine(), psutil.virtual_memory().available


@functools.cache
def _machine() -> str:
    """This machine since it was started; hosts of an emulated cluster are one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return f"{uuid.getnode():x}"
