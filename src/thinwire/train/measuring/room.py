"""The memory that a rank may use, and the error message of a rank that runs out of it."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from thinwire.errors import OutOfMemoryError, Room
from thinwire.profile import process_memory
from thinwire.train.environment import ranks_of_host, ranks_of_machine
from thinwire.units import format_bytes

_SIGNS: Final = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc", "Cannot allocate memory")
"""Phrases by which torch's allocators, C++ and the system report exhausted memory in a plain ``RuntimeError``."""

_ASKED: Final = re.compile(r"tried to allocate ([\d.]+ \w+)", re.IGNORECASE)


def rank_memory(device: torch.device) -> int:
    """Bytes that a rank may use: its share of the memory of its device or of this host."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return int(total) // max(1, -(-ranks_of_host() // torch.cuda.device_count()))
    return min(_physical(), _cgroup_limit()) // ranks_of_machine()


def measure_room(device: torch.device) -> Room:
    """Measure the memory that this rank may use, and the memory in use before the model is built."""
    limit = rank_memory(device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Room("GPU memory", limit, (total - free) * limit // total)
    virtual, resident = process_memory()
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    # Far less of the address space is resident, so this limit is the tighter one only where it leaves less.
    if address_space != resource.RLIM_INFINITY and address_space - virtual < limit - resident:
        return Room("address space (ulimit -v)", address_space, virtual)
    return Room("its share of this host's memory", limit, resident)


@contextlib.contextmanager
def explained_exhaustion(rank: int, doing: str, room: Room) -> Iterator[None]:
    """Turn an allocator's error while a rank is ``doing`` something into a sentence that names the rank, the request
    and the limit.

    Raises:
        OutOfMemoryError: In place of an allocator's error, including one that looks like a lost connection.
    """
    try:
        yield
    except Exception as error:
        line = exhaustion(error)
        if line is None:
            raise
        asked = _ASKED.search(line)
        wanted = f" for {_readable(asked[1])} more" if asked else ""
        raise OutOfMemoryError(
            f"rank {rank} ran out of memory{wanted} while {doing}: {room.kind} is {format_bytes(room.limit)}, of which "
            f"{format_bytes(room.base)} were in use before there was a model",
            room,
        ) from error


def exhaustion(error: BaseException | None) -> str | None:
    """The line about exhausted memory in an error or in one of its causes; ``None`` if memory was not the cause."""
    while error is not None:
        lines = str(error).splitlines() or [""]
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return lines[0]
        if isinstance(error, RuntimeError | OSError):
            for line in lines:
                if any(sign in line for sign in _SIGNS):
                    return line
        error = error.__cause__ or error.__context__
    return None


def _readable(amount: str) -> str:
    number, unit = amount.split()
    return format_bytes(int(number)) if unit == "bytes" else amount


def _physical() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_limit() -> int:
    """Memory limit of the container in bytes, if there is one."""
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            return int(Path(name).read_text(encoding="utf-8"))
    return _physical()
