"""Chooses the transport of a job: NCCL if every rank has a GPU of its own, else gloo.

How many GPUs a process sees does not tell: a scheduler may show each rank one GPU only. So ranks tell each other which
GPU they use, by its identifier, and rank 0 decides for all.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from thinwire.errors import UsageError

log = logging.getLogger("thinwire")

GLOO, NCCL = "gloo", "cpu:gloo,cuda:nccl"

_FLIGHT_RECORDS = "TORCH_FR_BUFFER_SIZE"
"""Number of collectives that torch's flight recorder keeps; 2,000 by default."""


def gpu_of(device: torch.device) -> str:
    """Identifier of a GPU (or of a part of one, with MIG) that no other GPU of any host has; empty for the CPU."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def agree_on_transport(store: dist.Store, rank: int, world: int, gpu: str, timeout: datetime.timedelta) -> str:
    """Choose the backend of ``init_process_group`` together with all other ranks; ``gpu`` is that of :func:`gpu_of`.

    Raises:
        UsageError: Some ranks have a GPU and some have none, or a rank does not come in time.
    """
    part = dist.PrefixStore("thinwire/transport", store)
    part.set(str(rank), gpu)
    try:
        if rank == 0:
            names = [str(other) for other in range(world)]
            part.wait(names, timeout)
            part.set("choice", json.dumps(choose_transport([part.get(name).decode() for name in names])))
        part.wait(["choice"], timeout)
    except RuntimeError as error:
        raise UsageError(
            f"rank {rank} has waited {timeout.total_seconds():.0f} s for the other {world - 1} ranks to say which GPU "
            "they use; see whether all of them were started"
        ) from error
    backend, problem, warning = json.loads(part.get("choice"))
    if problem:
        raise UsageError(problem)
    if warning and rank == 0:
        log.warning(warning)
    return str(backend)


def forgo_flight_recorder() -> None:
    """Let torch keep no record of each collective, unless the user asks for records or this process may use NCCL.

    Records take about a kilobyte each and a Python traceback's time. Only NCCL writes them out when ranks hang; under
    gloo, the roll call says where ranks wait. Call it before the first collective of the process.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault(_FLIGHT_RECORDS, "0")


def choose_transport(gpus: Sequence[str]) -> tuple[str, str, str]:
    """Choose the backend from identifiers of ranks' GPUs, empty on CPUs. Returns it, the sentence of an error and that
    of a warning, which are empty if all is well."""
    without = [rank for rank, gpu in enumerate(gpus) if not gpu]
    if len(without) == len(gpus):
        return GLOO, "", ""
    if without:
        return (
            GLOO,
            f"ranks {without} have no GPU, and the others have one: give every rank a GPU, or set cluster.device = "
            '"cpu" or CUDA_VISIBLE_DEVICES="" for all of them',
            "",
        )
    sharers: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        sharers.setdefault(gpu, []).append(rank)
    shared = {gpu: ranks for gpu, ranks in sharers.items() if len(ranks) > 1}
    if not shared:
        return NCCL, "", ""
    gpu, ranks = next(iter(shared.items()))
    return (
        GLOO,
        "",
        f"ranks {ranks} share GPU {gpu}, which NCCL does not allow: all exchanges go through the host over gloo, which "
        "is slow; start one rank for each GPU",
    )
