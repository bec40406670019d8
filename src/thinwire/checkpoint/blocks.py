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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import torch
from zlib_ng.zlib_ng import crc32

log = logging.getLogger("thinwire")

BLOCK_BYTES: Final = 2 << 20
"""Bytes of a block, which has a checksum of its own. Two are in memory at a time for writing, three for reading. Larger
ones are not faster."""

_AHEAD: Final = 2
"""Blocks that are read while the caller has one, so that the disk always has something to do."""

_MOST_VIEWS: Final = 1024
"""Tensors that one call fills; Linux takes no more."""

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


@final
@dataclass(frozen=True)
class Piece:
    """Successive bytes of a file, and where they go.

    Attributes:
        begin: First byte.
        length: Number of bytes, at most :data:`BLOCK_BYTES`.
        direct: Bytes that go straight into tensors: the number of bytes of the piece before each tensor, and the
            tensor, 1-D, contiguous, uint8, on the CPU. In order and apart from each other.
    """

    begin: int
    length: int
    direct: Sequence[tuple[int, torch.Tensor]] = ()


def read_ahead(path: Path, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, torch.Tensor, list[torch.Tensor]]]:
    """Read pieces of a file; the next two are read while the caller has one. Bytes that go nowhere else go into a block
    of memory, which later pieces use again.

    Yields:
        Each piece; a block of as many bytes, which begins at a page of memory, and of which those are valid that have
        no tensor of their own, until the next one is asked for; and all bytes in their order, wherever they are.
        1-D, uint8, on the CPU.

    Raises:
        OSError: The file cannot be read, or ends before a piece does.
    """
    blocks = [_new_block() for _ in range(_AHEAD + 1)]
    reading: deque[tuple[Piece, torch.Tensor, list[torch.Tensor], Future[None]]] = deque()

    def arrived() -> tuple[Piece, torch.Tensor, list[torch.Tensor]]:
        piece, block, parts, done = reading.popleft()
        done.result()
        return piece, block, parts

    with path.open("rb", buffering=0) as stream, ThreadPoolExecutor(1) as disk:
        for number, piece in enumerate(pieces):
            block = blocks[number % len(blocks)][: piece.length]
            parts = list(_parts(piece, block))
            reading.append((piece, block, parts, disk.submit(read_into, stream.fileno(), piece.begin, parts)))
            if len(reading) > _AHEAD:
                yield arrived()
        while reading:
            yield arrived()


def _parts(piece: Piece, block: torch.Tensor) -> Iterator[torch.Tensor]:
    """Where the bytes of a piece go, in order: tensors of their own, and the block for what is between them."""
    done = 0
    for offset, tensor in piece.direct:
        if done < offset:
            yield block[done:offset]
        yield tensor
        done = offset + tensor.numel()
    if done < piece.length:
        yield block[done:]


def read_into(descriptor: int, position: int, targets: Iterable[torch.Tensor]) -> None:
    """Fill tensors, 1-D, contiguous, on the CPU and of any dtype, with successive bytes of an open file.

    Raises:
        OSError: The file ends before the tensors are full, or cannot be read.
    """
    views = [view for target in targets if (view := as_bytes(target).numpy().data)]
    while views:
        length = os.preadv(descriptor, views[:_MOST_VIEWS], position)
        if not length:
            raise OSError(errno.EIO, "the file has become shorter")
        position += length
        full = 0
        while full < len(views) and len(views[full]) <= length:
            length -= len(views[full])
            full += 1
        del views[:full]
        if length:
            views[0] = views[0][length:]


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
