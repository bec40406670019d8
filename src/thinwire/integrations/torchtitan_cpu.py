"""Lets torchtitan run without an accelerator, to rehearse a configuration on CPUs.

torchtitan 0.3 has no CPU path of its own: without an accelerator, it assumes CUDA. Its device is two attributes of one
module, which other modules copy when they are imported. :func:`use_cpu` sets them first. ``flex`` attention has no
backward on CPUs; the override that :data:`DENSE_ATTENTION` names replaces it.
"""

from __future__ import annotations

import datetime
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist

from thinwire.errors import UsageError

__all__ = ["DENSE_ATTENTION", "CpuDevice", "use_cpu"]

DENSE_ATTENTION = "thinwire.integrations.torchtitan.dense_attention"
"""Target for ``override.imports`` that replaces ``flex`` attention by causal attention over whole sequences."""

_COPIES = "torchtitan.distributed.utils"
"""A module of torchtitan that copies the device when it is imported."""


class CpuDevice:
    """What torchtitan asks of ``torch.cuda``, answered for the CPUs that this process runs on."""

    set_device = staticmethod(torch.cpu.set_device)
    synchronize = staticmethod(torch.cpu.synchronize)
    is_available = staticmethod(torch.cpu.is_available)

    def device_count(self) -> int:
        """Number of devices: one, however many cores there are."""
        return 1

    def current_device(self) -> int:
        """Number of the device."""
        return 0

    def get_device_name(self, device: Any = None) -> str:
        """Name of the device."""
        del device
        return "cpu"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        """Memory of the machine, in bytes."""
        del device
        return SimpleNamespace(total_memory=psutil.virtual_memory().total)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Resident memory of this process, in bytes. It is the present one: the kernel keeps no peak that can be
        reset."""
        del device
        resident = psutil.Process().memory_info().rss
        return {"active_bytes.all.peak": resident, "reserved_bytes.all.peak": resident}

    def reset_peak_memory_stats(self) -> None:
        """Nothing: no peak is kept."""

    def empty_cache(self) -> None:
        """Nothing: freed memory is returned at once."""


def use_cpu() -> None:
    """Make torchtitan use CPUs and gloo. Call this before you import anything else of torchtitan.

    torchtitan 0.3 also calls ``torch.distributed.set_timeout``, which releases of PyTorch lack up to 2.13. It is added
    there under the name that nightly builds have.

    Raises:
        UsageError: torchtitan has already chosen another device.
    """
    import torchtitan.tools.utils as device

    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = _set_timeout  # type: ignore[attr-defined]
    if device.device_type == "cpu":
        return
    if _COPIES in sys.modules:
        raise UsageError(
            f"{_COPIES} was imported with the device {device.device_type!r}: call use_cpu() before other imports of "
            "torchtitan"
        )
    device.device_type, device.device_module = "cpu", CpuDevice()


def _set_timeout(timeout: datetime.timedelta, group: Any = None) -> None:
    dist.distributed_c10d._set_pg_timeout(timeout, group)  # noqa: TID251 - no collective
