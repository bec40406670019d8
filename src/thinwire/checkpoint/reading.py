"""Safetensors files of a checkpoint into tensors: a block is compared with its checksum before it is copied.

A file is read once, from beginning to end, and only the blocks that hold its header or wanted elements. Files of
version 1 of the format have one checksum for all of their bytes; they are compared first and then read again, this time
from the page cache if they fit there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import torch
from zlib_ng.zlib_ng import crc32

from thinwire.checkpoint.blocks import BLOCK_BYTES, as_bytes, read_ahead, read_into
from thinwire.checkpoint.manifest import FileEntry, Manifest, StoredSpan, check_header, check_size, os_reason
from thinwire.checkpoint.storage import ShardedVector
from thinwire.errors import CheckpointError

_CONVERTED: Final = 1 << 22
"""Elements that are converted, or sent to a device, at a time."""


def check_file(directory: Path, file: FileEntry, contents: Mapping[str, tuple[torch.dtype, StoredSpan]]) -> None:
    """Compare a whole safetensors file with its manifest entry: size, checksums and header.

    Args:
        directory: The checkpoint.
        file: Manifest entry of the file.
        contents: Span of every key that the file should hold.

    Raises:
        CheckpointError: Something differs; the message names the file.
    """
    path = directory / file.name
    check_size(path, file.size)
    _check_blocks(path, file)
    check_header(path, file.size, contents)


@final
class Reading:
    """What a rank wants from a checkpoint, found file by file before any of it is read.

    Args:
        directory: The checkpoint.
        manifest: Its table of contents.
        vectors: What is wanted, of lengths and element types that fit the manifest.

    Raises:
        CheckpointError: The header of a file with wanted elements is malformed or contradicts the manifest.
    """

    def __init__(self, directory: Path, manifest: Manifest, vectors: Mapping[str, ShardedVector]) -> None:
        contents = manifest.contents()
        self._files: list[_Wanted] = []
        for index, copies in _by_file(manifest, vectors).items():
            file = manifest.files[index]
            path = directory / file.name
            begins = check_header(path, file.size, contents[index])
            runs = []
            for copy in copies:
                dtype = contents[index][copy.key][0]
                runs.append(_Run(begins[copy.key] + copy.start * dtype.itemsize, dtype, copy.target))
            runs.sort(key=lambda run: run.begin)
            self._files.append(_Wanted(path, file, min(begins.values()), runs))

    def fill(self) -> None:
        """Copy the wanted elements into the chunks. No block that differs from its checksum reaches a tensor.

        Raises:
            CheckpointError: A file cannot be read, or a block is corrupt. Tensors may have been filled by then.
        """
        for wanted in self._files:
            if wanted.file.block_bytes <= BLOCK_BYTES:
                wanted.copy_checked()
            else:
                _check_blocks(wanted.path, wanted.file)
                wanted.copy_unchecked()

    def fill_unchecked(self) -> None:
        """As :meth:`fill`, from files that have passed :func:`check_file`.

        Raises:
            CheckpointError: A file cannot be read.
        """
        for wanted in self._files:
            wanted.copy_unchecked()


@final
@dataclass(frozen=True)
class _Copy:
    """Elements to copy from a file.

    Attributes:
        key: Name of the vector.
        start: Index in the stored span of the first element.
        target: Where the elements go: a part of a chunk.
    """

    key: str
    start: int
    target: torch.Tensor


@final
@dataclass(frozen=True)
class _Run:
    """Bytes of a file that are wanted.

    Attributes:
        begin: First byte.
        dtype: Type of the stored elements.
        target: Where they go.
    """

    begin: int
    dtype: torch.dtype
    target: torch.Tensor

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.begin + self.target.numel() * self.dtype.itemsize

    def take(self, begin: int, piece: torch.Tensor) -> None:
        """Copy what a piece of the file, of which ``begin`` is the first byte, has of the run."""
        low, high = max(begin, self.begin), min(begin + piece.numel(), self.end)
        size = self.dtype.itemsize
        target = self.target[(low - self.begin) // size : (high - self.begin) // size]
        source = piece[low - begin : high - begin]
        if target.device.type == "cpu" and target.dtype == self.dtype:
            as_bytes(target).copy_(source)
        else:
            target.copy_(source.view(self.dtype))


@final
@dataclass(frozen=True)
class _Wanted:
    """A file of which elements are wanted.

    Attributes:
        path: The file.
        file: Its manifest entry.
        header_bytes: Bytes before the first element.
        runs: What is wanted, in the order of the file. Runs may overlap.
    """

    path: Path
    file: FileEntry
    header_bytes: int
    runs: Sequence[_Run]

    def copy_checked(self) -> None:
        """Copy the runs from blocks that have the right checksums. The header counts as wanted: it says where."""
        upcoming, present = iter(self.runs), list[_Run]()
        following = next(upcoming, None)
        for begin, piece in _pieces(self.path, self.file, self._blocks()):
            while following is not None and following.begin < begin + piece.numel():
                present.append(following)
                following = next(upcoming, None)
            for run in present:
                run.take(begin, piece)
            present = [run for run in present if run.end > begin + piece.numel()]

    def copy_unchecked(self) -> None:
        """Copy the runs, straight into their tensors where it is possible."""
        try:
            with self.path.open("rb", buffering=0) as stream:
                for run in self.runs:
                    _fill(stream.fileno(), run)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {os_reason(error)}") from error

    def _blocks(self) -> list[int]:
        """The blocks that hold the header or a part of a run."""
        size, numbers = self.file.block_bytes, set(range(-(-self.header_bytes // self.file.block_bytes)))
        for run in self.runs:
            numbers.update(range(run.begin // size, -(-run.end // size)))
        return sorted(numbers)


def _fill(descriptor: int, run: _Run) -> None:
    position, target = run.begin, run.target
    if target.device.type == "cpu" and target.dtype == run.dtype:
        read_into(descriptor, position, target)
        return
    stored = torch.empty(min(_CONVERTED, target.numel()), dtype=run.dtype)
    for part in target.split(_CONVERTED):
        read_into(descriptor, position, stored[: part.numel()])
        part.copy_(stored[: part.numel()])
        position += part.numel() * run.dtype.itemsize


def _check_blocks(path: Path, file: FileEntry) -> None:
    """Compare every block of a file with its checksum; errors as of :func:`_pieces`."""
    for _ in _pieces(path, file, range(len(file.crcs))):
        pass


def _pieces(path: Path, file: FileEntry, numbers: Iterable[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """Read blocks of a file and compare them with their checksums.

    Args:
        path: The file.
        file: Its manifest entry.
        numbers: Which blocks, in order.

    Yields:
        First byte and bytes of each piece, valid until the next one is asked for. A block of at most
        :data:`BLOCK_BYTES` is one piece, and is yielded if it is right; a longer one is several, of which only the last
        tells that it is right.

    Raises:
        CheckpointError: The file cannot be read, or a block differs from its checksum.
    """
    spans, last_of = [], {}
    for number in numbers:
        begin, length = file.block(number)
        spans += [(at, min(BLOCK_BYTES, begin + length - at)) for at in range(begin, begin + length, BLOCK_BYTES)]
        last_of[begin + length] = number
    crc = 0
    try:
        for begin, piece in read_ahead(path, spans):
            crc = crc32(piece.numpy().data, crc)
            complete = last_of.get(begin + piece.numel())
            if complete is not None:
                _compare(path, file, complete, crc)
                crc = 0
            yield begin, piece
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {os_reason(error)}") from error


def _compare(path: Path, file: FileEntry, number: int, crc: int) -> None:
    if crc != file.crcs[number]:
        begin, length = file.block(number)
        raise CheckpointError(
            f"{path}: corrupt: the CRC-32 of bytes {begin} to {begin + length} is {crc:08x}, the manifest says "
            f"{file.crcs[number]:08x}"
        )


def _by_file(manifest: Manifest, vectors: Mapping[str, ShardedVector]) -> dict[int, list[_Copy]]:
    """List the copies that fill the chunks, by index of the file, so that each file is opened once."""
    files: dict[int, list[_Copy]] = {}
    for key, vector in vectors.items():
        for chunk in vector.chunks:
            wanted_end, num_read = chunk.offset + chunk.tensor.numel(), 0
            for span in manifest.vectors[key].spans:
                begin, end = max(chunk.offset, span.offset), min(wanted_end, span.offset + span.length)
                if begin < end:
                    target = chunk.tensor.detach()[begin - chunk.offset : end - chunk.offset]
                    files.setdefault(span.file, []).append(_Copy(key, begin - span.offset, target))
                    num_read += end - begin
            assert num_read == chunk.tensor.numel(), f"{key}: the spans hold {num_read} of {chunk.tensor.numel()}"
    return files
