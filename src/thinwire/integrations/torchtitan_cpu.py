"""Lets torchtitan run without an accelerator, to rehearse a configuration on CPUs.

torchtitan has no CPU path of its own: without an accelerator, it assumes CUDA. Its device is two attributes of one
module, which other modules copy when they are imported. :func:`use_cpu` sets them, and their copies. ``flex`` attention
has no backward on CPUs; the override that :data:`DENSE_ATTENTION` names replaces it in torchtitan 0.3.
"""

from __future__ import annotations

import datetime
import sys
from types import SimpleNamespace
from typing import Any, Final

import psutil
import torch
import torch.distributed as dist

DENSE_ATTENTION = "thinwire.integrations.torchtitan.dense_attention"
"""Target for ``override.imports`` that replaces ``flex`` attention by causal attention over whole sequences."""


def _memory_stats(device: Any = None) -> dict[str, int]:
    """Resident memory of this process, in bytes. It is the present one: the kernel keeps no peak that can be reset."""
    del device
    resident = psutil.Process().memory_info().rss
    return {"active_bytes.all.peak": resident, "reserved_bytes.all.peak": resident}


_DEVICE: Final = SimpleNamespace(
    set_device=torch.cpu.set_device,
    synchronize=torch.cpu.synchronize,
    is_available=torch.cpu.is_available,
    device_count=lambda: 1,  # however many cores there are
    current_device=lambda: 0,
    get_device_name=lambda device=None: "cpu",
    get_device_properties=lambda device=None: SimpleNamespace(total_memory=psutil.virtual_memory().total),
    memory_stats=_memory_stats,
    reset_peak_memory_stats=lambda: None,  # no peak is kept
    empty_cache=lambda: None,  # freed memory is returned at once
)
"""What torchtitan asks of ``torch.cuda``, answered for the CPUs that this process runs on."""


def use_cpu() -> None:
    """Make torchtitan use CPUs and gloo. Call this before you make anything of torchtitan.

    torchtitan 0.3 also calls ``torch.distributed.set_timeout``, which releases of PyTorch lack up to 2.13. It is added
    there under the name that nightly builds have.
    """
    import torchtitan.tools.utils  # noqa: F401 - the module that chooses the device

    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = _set_timeout  # type: ignore[attr-defined]
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and {"device_type", "device_module"} & vars(module).keys():
            vars(module).update(device_type="cpu", device_module=_DEVICE)


def _set_timeout(timeout: datetime.timedelta, group: Any = None) -> None:
    dist.distributed_c10d._set_pg_timeout(timeout, group)  # noqa: TID251 - no collective
