"""What thinwire uses of a job: joining and leaving it, its groups, and their exchanges.

Only this module and those of :mod:`thinwire.collectives.job` call ``torch.distributed``.
"""

from __future__ import annotations

import datetime
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist

from thinwire.collectives.gateway.keys import KEYS, Keys
from thinwire.collectives.gateway.shelter import BACKEND, Shelter
from thinwire.collectives.job.connecting import abort_links, connect, forget_links
from thinwire.collectives.job.control import Control, control, control_beside, forget_controls, is_initialized, ranks_of
from thinwire.collectives.job.current import DEFAULT_TIMEOUT, job
from thinwire.collectives.job.failures import explained_transport
from thinwire.collectives.job.rollcall import RollCall
from thinwire.collectives.job.subgroup import Meter, Record, Subgroup, leave_subgroups, recording
from thinwire.collectives.job.torch_groups import arrived, named_group, release_defaults
from thinwire.collectives.links.rendezvous import Rendezvous
from thinwire.collectives.links.transport import NCCL, agree_on_transport, forgo_flight_recorder, gpu_of
from thinwire.collectives.memory import release_memory
from thinwire.errors import UsageError

__all__ = [
    "Control",
    "DEFAULT_TIMEOUT",
    "Meter",
    "Record",
    "Subgroup",
    "arrived",
    "before_shutdown",
    "connect",
    "control",
    "control_beside",
    "enter",
    "explained_transport",
    "init",
    "is_initialized",
    "mesh_group",
    "ranks_of",
    "recording",
    "rollcall",
    "shutdown",
]


def init(
    backend: str | None = None,
    timeout: datetime.timedelta = DEFAULT_TIMEOUT,
    device: torch.device | None = None,
    keys: str | os.PathLike[str] | None = None,
) -> None:
    """Join the job described by torchrun's environment (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``).

    Without ``RANK`` in the environment, this makes a job of one process.

    Args:
        backend: ``"gloo"``, ``"nccl"`` or ``"cpu:gloo,cuda:nccl"``. Default: the last if every rank has a GPU of its
            own, else gloo.
        timeout: Limit of every collective, in every group made later.
        device: Device of this rank's tensors; default: the current CUDA device, or the CPU if there is none.
        keys: Directory of the job's keys; default: that of ``THINWIRE_KEYS``. With keys, everything between hosts is
            encrypted, and comes from ranks that have the same keys.

    Raises:
        UsageError: Rank 0 cannot listen at its address, the ranks do not find each other in time, some have a GPU
            and others have none, or what is asked for cannot be protected by keys.
    """
    job.timeout = timeout
    keys = keys or os.environ.get(KEYS)
    job.joined_here = not dist.is_initialized()
    if not job.joined_here:
        _refuse_late(keys)
        return
    job.has_keys = bool(keys)
    rank, world, store = 0, 1, cast(dist.Store, dist.HashStore())
    if "RANK" in os.environ:
        place = Rendezvous.of()
        rank, world, store = place.rank, place.world, _store_at(place, timeout, keys)
    if backend is None:
        if device is None:
            device = torch.device("cuda", _local_gpu()) if torch.cuda.is_available() else torch.device("cpu")
        backend = agree_on_transport(store, rank, world, gpu_of(device), timeout)
    elif backend == "nccl":
        backend = NCCL
    if job.shelter is not None:
        backend = _sheltered(backend)
    forgo_flight_recorder()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def _refuse_late(keys: str | os.PathLike[str] | None) -> None:
    if keys and not job.has_keys:
        raise UsageError(
            f"{KEYS} or cluster.keys = {keys} comes too late: torch.distributed is initialised already, without "
            "keys; call thinwire.collectives.group.init() instead of init_process_group(), or unset it"
        )


def _store_at(place: Rendezvous, timeout: datetime.timedelta, keys: str | os.PathLike[str] | None) -> dist.Store:
    """The job's store, behind keys if there are any and the job has several hosts."""
    if not keys:
        return place.store(timeout)
    found = Keys.read(os.fspath(keys))
    if place.on_one_host:
        return place.store(timeout)  # on the loopback interface, like gloo
    job.shelter = Shelter(place, found, timeout)
    return job.shelter.store


def _sheltered(backend: str) -> str:
    if backend != "gloo":
        raise UsageError(
            f"cluster.keys protects gloo, but the ranks' GPUs use {backend}: NCCL neither authenticates nor encrypts; "
            "leave cluster.keys out and use a VPN or a private network between the hosts"
        )
    return BACKEND


def _local_gpu() -> int:
    """The GPU that a rank is about to use: the one it has chosen, or the one with its number on this host."""
    chosen = torch.cuda.current_device()
    return chosen or int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()


_closing: list[Callable[[], Callable[[], None] | None]] = []


def before_shutdown(close: Callable[[], None]) -> None:
    """Call ``close`` before the groups are destroyed, or once the user has destroyed them, so that their users can
    finish. A method does not keep its object alive: one that is gone has nothing to finish."""
    _closing.append(weakref.WeakMethod(close, _closing.remove) if inspect.ismethod(close) else lambda: close)


def enter() -> None:
    """Be part of a job: enter the one of the environment, unless ``torch.distributed`` is initialised. All ranks call
    this.

    Raises:
        UsageError: As for :func:`init`.
    """
    if not is_initialized():
        init()
        return
    if job.is_left():  # torch's default group was replaced rather than destroyed
        _leave()
    _refuse_late(os.environ.get(KEYS))


def _leave() -> None:
    """Leave a job whose default group is gone: nothing may go on as if it were there, nor keep its store."""
    job.begin_rollcall()
    _forget(close_links=False)
    job.number += 1
    _close_shelter()


job.leave = _leave


def _forget(*, close_links: bool) -> None:
    """Let go of everything that belongs to the job."""
    while _closing:
        close = _closing.pop()()
        if close is not None:
            close()
    leave_subgroups()
    forget_controls()
    forget_links(close=close_links)
    release_memory()
    release_defaults(None if job.group is None else job.group())
    job.forget_group()


def _close_shelter() -> None:
    job.has_keys = False
    if job.shelter is not None:
        job.shelter.close()
        job.shelter = None


def shutdown() -> None:
    """Leave the job. A second call has no effect.

    After an error, or while one is handled (as in a ``finally``), pending operations are aborted: other ranks may never
    make the calls that they wait for.
    """
    in_error = job.has_failed or sys.exc_info()[0] is not None
    job.has_failed = False
    job.begin_rollcall()
    if in_error:
        abort_links(native=True)
    _forget(close_links=not in_error)
    if is_initialized():
        job.number += 1
        dist.destroy_process_group()
    _close_shelter()


def rollcall() -> RollCall:
    """The roll call of this process, which watches its exchanges."""
    return job.rollcall


def mesh_group(ranks: Sequence[int], axis: str) -> dist.ProcessGroup:
    """Make a process group for an axis of torch's mesh, with the job's timeout. Only its members call this.

    A mesh would make groups by itself, but with a timeout of half an hour.
    """
    return named_group(f"thinwire/{job.number}/mesh-{axis}", ranks, job.timeout)
