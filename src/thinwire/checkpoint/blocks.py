"""Files in blocks: written past the page cache where the file system allows it, and read two blocks ahead.

Storing a page of a file in the page cache costs more processor time than a disk takes to write it. A checkpoint is not
read soon, so its bytes go from a block of memory straight to the disk (``O_DIRECT``), which leaves the processor to
training. File systems that refuse that, such as tmpfs, get the same bytes by way of the page cache, and the log says so
once.

One thread fills or checks a block while another waits for the disk. Both release the interpreter lock, except for a few
calls for each block.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch
from zlib_ng.zlib_ng import crc32

log = logging.getLogger("thinwire")

BLOCK_BYTES: Final = 2 << 20
"""Bytes of a block, which has a checksum of its own. Two are in memory at a time for writing, three for reading. Larger
ones are not faster."""

_AHEAD: Final = 2
"""Blocks that are read while the caller has one, so that the disk always has something to do."""

_SECTOR: Final = 4096
"""Bytes; position, length and address of a write past the page cache are multiples of it."""

_DIRECT: Final = getattr(os, "O_DIRECT", 0)

_cached: set[int] = set()
"""Devices, by number, whose use of the page cache the log has told of."""


def write_durably(path: Path, parts: Iterable[torch.Tensor]) -> tuple[int, tuple[int, ...]]:
    """Create a file and write it to disk.

    Args:
        path: The file, which does not exist.
        parts: Its bytes in order, as 1-D contiguous uint8 tensors on any device.

    Returns:
        The size of the file in bytes, and the CRC-32 of each of its blocks, computed from the bytes in memory.

    Raises:
        OSError: The disk is full, or the file system fails otherwise.
    """
    blocks = [_new_block(), _new_block()]
    size, crcs = 0, []
    writing: Future[None] | None = None
    descriptor = _create(path)
    try:
        with ThreadPoolExecutor(1) as disk:
            for number, length in enumerate(_filled(blocks, parts)):
                block = blocks[number % 2].numpy().data
                crcs.append(crc32(block[:length]))
                size += length
                if writing is not None:
                    writing.result()
                writing = disk.submit(_write_all, descriptor, block[: -(-length // _SECTOR) * _SECTOR])
            if writing is not None:
                writing.result()
        os.ftruncate(descriptor, size)  # the last block was filled up to a whole sector
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size, tuple(crcs)


def read_ahead(path: Path, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, torch.Tensor]]:
    """Read spans of a file; the next two are read while the caller has one.

    Args:
        path: The file.
        spans: First byte and number of bytes of each span, at most :data:`BLOCK_BYTES`.

    Yields:
        The first byte of each span and its bytes, a 1-D uint8 tensor on the CPU that begins at a page of memory and is
        valid until the next one is asked for.

    Raises:
        OSError: The file cannot be read, or ends before a span does.
    """
    blocks = [_new_block() for _ in range(_AHEAD + 1)]
    reading: deque[tuple[int, torch.Tensor, Future[None]]] = deque()
    with path.open("rb", buffering=0) as stream, ThreadPoolExecutor(1) as disk:
        for number, (begin, length) in enumerate(spans):
            block = blocks[number % len(blocks)][:length]
            reading.append((begin, block, disk.submit(read_into, stream.fileno(), begin, block)))
            if len(reading) > _AHEAD:
                yield _arrived(*reading.popleft())
        while reading:
            yield _arrived(*reading.popleft())


def _arrived(begin: int, block: torch.Tensor, reading: Future[None]) -> tuple[int, torch.Tensor]:
    reading.result()
    return begin, block


def read_into(descriptor: int, position: int, target: torch.Tensor) -> None:
    """Fill a tensor with bytes of a file.

    Args:
        descriptor: The open file.
        position: First byte.
        target: 1-D, contiguous, on the CPU, of any dtype.

    Raises:
        OSError: The file ends before the tensor is full, or cannot be read.
    """
    view = as_bytes(target).numpy().data
    while view:
        length = os.preadv(descriptor, [view], position)
        if not length:
            raise OSError(errno.EIO, "the file has become shorter")
        view, position = view[length:], position + length


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a 1-D contiguous tensor, sharing its memory."""
    return tensor.detach().view(torch.uint8)


def _new_block() -> torch.Tensor:
    """A block at the beginning of a page of memory."""
    return torch.frombuffer(mmap.mmap(-1, BLOCK_BYTES), dtype=torch.uint8)


def _filled(blocks: list[torch.Tensor], parts: Iterable[torch.Tensor]) -> Iterator[int]:
    """Fill the blocks in turn with the bytes of the parts; yields their lengths. All but the last are full."""
    number, used = 0, 0
    for part in parts:
        taken = 0
        while taken < part.numel():
            length = min(part.numel() - taken, BLOCK_BYTES - used)
            blocks[number % 2][used : used + length].copy_(part[taken : taken + length])
            taken, used = taken + length, used + length
            if used == BLOCK_BYTES:
                yield used
                number, used = number + 1, 0
    if used:
        yield used


def _create(path: Path) -> int:
    """Open a new file, past the page cache if the file system allows it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)  # some file systems refuse the flag once the file is there
        descriptor = os.open(path, flags, 0o666)
        _tell_of_cache(descriptor)
        return descriptor


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except OSError as error:
            # Sectors are larger here, or a limit has cut the write before: the page cache takes any length.
            if error.errno != errno.EINVAL or not _leave_direct(descriptor):
                raise


def _leave_direct(descriptor: int) -> bool:
    """Write through the page cache from now on; whether that is a change."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not flags & _DIRECT:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
    _tell_of_cache(descriptor)
    return True


def _tell_of_cache(descriptor: int) -> None:
    """Say once, for each device, that files there go through the page cache."""
    device = os.fstat(descriptor).st_dev
    if device in _cached:
        return
    _cached.add(device)
    log.warning(
        "%s: this file system takes no direct writes (O_DIRECT), so checkpoints go through the page cache, which costs "
        "processor time while they are written",
        Path(f"/proc/self/fd/{descriptor}").readlink().parent,
    )
