"""Files in blocks: written past the page cache where the file system allows it, and read a block ahead.

Storing a page of a file in the page cache costs more processor time than a disk takes to write it. A checkpoint is not
read soon, so its bytes go from a block of memory straight to the disk (``O_DIRECT``), which leaves the processor to
training. File systems that refuse that, such as tmpfs, get the same bytes by way of the page cache.

One thread fills or checks a block while another waits for the disk. Both release the interpreter lock, except for a few
calls for each block.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch

BLOCK_BYTES: Final = 2 << 20
"""Bytes of a block that is written; two are in memory at a time. Larger ones are not faster."""

_READ_BYTES: Final = 512 << 10
"""Bytes of a block that is read, which is still in the processor's cache when it is checked."""

_SECTOR: Final = 4096
"""Bytes; position, length and address of a write past the page cache are multiples of it."""

_DIRECT: Final = getattr(os, "O_DIRECT", 0)


def write_durably(path: Path, parts: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Create a file and write it to disk.

    Args:
        path: The file, which does not exist.
        parts: Its bytes in order, as 1-D contiguous uint8 tensors on any device.

    Returns:
        The size of the file in bytes, and the CRC-32 of its bytes, computed from those in memory.

    Raises:
        OSError: The disk is full, or the file system fails otherwise.
    """
    blocks = [_new_block(), _new_block()]
    size, crc = 0, 0
    writing: Future[None] | None = None
    descriptor = _create(path)
    try:
        with ThreadPoolExecutor(1) as disk:
            for number, length in enumerate(_filled(blocks, parts)):
                block = blocks[number % 2].numpy().data
                crc = zlib.crc32(block[:length], crc)
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
    return size, crc


def read_ahead(path: Path) -> Iterator[memoryview]:
    """Read a file from beginning to end; the next block is read while the caller has one.

    Args:
        path: The file.

    Yields:
        Its bytes in order, valid until the next one is asked for.

    Raises:
        OSError: The file cannot be read.
    """
    blocks = [memoryview(bytearray(_READ_BYTES)) for _ in range(2)]
    with path.open("rb", buffering=0) as stream, ThreadPoolExecutor(1) as disk:
        reading = disk.submit(stream.readinto, blocks[0])
        number = 0
        while length := reading.result():
            block = blocks[number % 2][:length]
            number += 1
            reading = disk.submit(stream.readinto, blocks[number % 2])
            yield block


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
        return os.open(path, flags, 0o666)


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
    return True
