"""Lets torchtitan run without an accelerator, to rehearse a configuration on CPUs.

torchtitan has no CPU path of its own: without an accelerator, it assumes CUDA. Its device is two attributes of one
module, which other modules copy when they are imported. :func:`use_cpu` sets them, and their copies. ``flex`` attention
has no backward on CPUs; the override that :data:`DENSE_ATTENTION` names replaces it in torchtitan 0.3.
"""

from __future__ import annotations

import datetime
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist

DENSE_ATTENTION = "thinwire.integrations.torchtitan.dense_attention"
"""Target for ``override.imports`` that replaces ``flex`` attention by causal attention over whole sequences."""


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
    """Make torchtitan use CPUs and gloo. Call this before you make anything of torchtitan.

    torchtitan 0.3 also calls ``torch.distributed.set_timeout``, which releases of PyTorch lack up to 2.13. It is added
    there under the name that nightly builds have.
    """
    import torchtitan.tools.utils  # noqa: F401 - the module that chooses the device

    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = _set_timeout  # type: ignore[attr-defined]
    device = CpuDevice()
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and {"device_type", "device_module"} & vars(module).keys():
            vars(module).update(device_type="cpu", device_module=device)


def _set_timeout(timeout: datetime.timedelta, group: Any = None) -> None:
    dist.distributed_c10d._set_pg_timeout(timeout, group)  # noqa: TID251 - no collective
