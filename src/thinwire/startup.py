"""What CUDA, torch and NCCL read from the environment when they start, set when thinwire is imported.

Models are often on their device before thinwire is asked to shard them, and CUDA reads its variables once. So the first
import of thinwire is the last moment that all ways into it share: commands, ``tw.shard`` and integrations.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Final

log = logging.getLogger("thinwire")

_CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
_ALLOCATOR: Final = "PYTORCH_CUDA_ALLOC_CONF"

CUDA_VARIABLES: Final = {
    # Lanes, NCCL and computation use more streams than the 8 queues that a device has by default. Streams that share a
    # queue wait for each other.
    _CONNECTIONS: "32",
    # Gathered units of different sizes come and go, which would fragment segments of fixed size.
    _ALLOCATOR: "expandable_segments:True",
    # Kernels of several communicators may be resident at the same time; this lets them start in the order of their
    # calls, which is the same on all ranks.
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
}
"""Environment variables that CUDA, torch and NCCL read when they start."""

_is_late = False
"""Whether CUDA had started with its own number of connections, and nobody has been told."""


def prepare_cuda() -> None:
    """Set the variables of :data:`CUDA_VARIABLES` that the user has not set."""
    global _is_late
    torch = sys.modules.get("torch")
    _is_late = _CONNECTIONS not in os.environ and torch is not None and torch.cuda.is_initialized()
    for name, value in CUDA_VARIABLES.items():
        if name != _ALLOCATOR or "PYTORCH_ALLOC_CONF" not in os.environ:  # the same settings, by torch's newer name
            os.environ.setdefault(name, value)


def warn_of_late_start() -> None:
    """Log once that CUDA has fewer connections than lanes need, if it started before thinwire was imported."""
    global _is_late
    if _is_late:
        _is_late = False
        log.warning(
            "CUDA was in use before thinwire was imported, so it has its default of 8 connections: streams share them "
            "and wait for each other; import thinwire before the first use of CUDA, or start with %s=%s",
            _CONNECTIONS,
            CUDA_VARIABLES[_CONNECTIONS],
        )
