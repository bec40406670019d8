"""Safetensors files of a checkpoint into tensors, each block compared with its checksum.

A file is read once, from beginning to end, and only the blocks that hold its header or wanted elements. Elements go
straight into their tensors, where the checksum still finds them in the processor's cache: a copy beside would cost a
third of what a fast disk takes. Only those that change their type, or whose tensor is on a device, go through a block
of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import final

import torch
from zlib_ng.zlib_ng import crc32

from thinwire.checkpoint.blocks import BLOCK_BYTES, Piece, as_bytes, read_ahead, read_into
from thinwire.checkpoint.manifest import FileEntry, Manifest, StoredSpan, check_size, os_reason
from thinwire.checkpoint.storage import ShardedVector, check_header
from thinwire.errors import CheckpointError


def check_file(directory: Path, file: FileEntry, contents: Mapping[str, tuple[torch.dtype, StoredSpan]]) -> None:
    """Compare a whole safetensors file with its manifest entry, and with the spans of the keys that it should hold:
    size, checksums and header.

    Raises:
        CheckpointError: Something differs; the message names the file.
    """
    path = directory / file.name
    check_size(path, file.size)
    for _ in _checked(path, file, [Piece(*span) for span in _spans(file, range(len(file.crcs)))]):
        pass
    check_header(path, file.size, contents)


def wanted_files(directory: Path, manifest: Manifest, vectors: Mapping[str, ShardedVector]) -> list[WantedFile]:
    """What a rank wants from a checkpoint, of lengths and element types that fit the manifest; found file by file
    before any of it is read.

    Raises:
        CheckpointError: The header of a file with wanted elements is malformed or contradicts the manifest.
    """
    contents = manifest.contents()
    begins: dict[int, dict[str, int]] = {}  # of the elements of each key, by file
    runs: dict[int, list[_Run]] = {}
    for key, vector in vectors.items():
        for chunk in vector.chunks:
            wanted_end, num_read = chunk.offset + chunk.tensor.numel(), 0
            for span in manifest.vectors[key].spans:
                begin, end = max(chunk.offset, span.offset), min(wanted_end, span.offset + span.length)
                if begin >= end:
                    continue
                if (number := span.file) not in begins:
                    file = manifest.files[number]
                    begins[number] = check_header(directory / file.name, file.size, contents[number])
                dtype = contents[number][key][0]
                first = begins[number][key] + (begin - span.offset) * dtype.itemsize
                target = chunk.tensor.detach()[begin - chunk.offset : end - chunk.offset]
                runs.setdefault(number, []).append(_Run(first, dtype, target))
                num_read += end - begin
            assert num_read == chunk.tensor.numel(), f"{key}: the spans hold {num_read} of {chunk.tensor.numel()}"
    files = []
    for number, of_file in runs.items():
        of_file.sort(key=lambda run: run.begin)
        file = manifest.files[number]
        files.append(WantedFile(directory / file.name, file, min(begins[number].values()), of_file))
    return files


@final
@dataclass(frozen=True)
class _Run:
    """Bytes of a file that are wanted: the first one, the type of the stored elements, and where they go."""

    begin: int
    dtype: torch.dtype
    target: torch.Tensor

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.begin + self.target.numel() * self.dtype.itemsize

    @property
    def is_straight(self) -> bool:
        """Whether its bytes in the file are those of its tensor in memory."""
        return self.target.device.type == "cpu" and self.target.dtype == self.dtype

    def part_of(self, begin: int, end: int) -> tuple[int, torch.Tensor]:
        """The part of a straight run that lies in a piece of the file: bytes of the piece before it, and its tensor."""
        low, high = max(begin, self.begin), min(end, self.end)
        return low - begin, as_bytes(self.target)[low - self.begin : high - self.begin]

    def take(self, begin: int, block: torch.Tensor) -> None:
        """Copy what a block, whose first byte is ``begin`` in the file, has of the run."""
        low, high = max(begin, self.begin), min(begin + block.numel(), self.end)
        source, size = block[low - begin : high - begin].view(self.dtype), self.dtype.itemsize
        self.target[(low - self.begin) // size : (high - self.begin) // size].copy_(source)


@final
@dataclass(frozen=True)
class WantedFile:
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

    def fill(self) -> None:
        """Read the runs, and compare every block that holds some with its checksum. The header counts as wanted: it
        says where they are.

        Raises:
            CheckpointError: The file cannot be read, or a block is corrupt. By then, tensors may have been filled, and
                those with elements of the corrupt block with what it holds.
        """
        placed = self._placed()
        blocks = _checked(self.path, self.file, [piece for piece, _ in placed])
        for block, (piece, copied) in zip(blocks, placed, strict=True):
            for run in copied:
                run.take(piece.begin, block)

    def fill_unchecked(self) -> None:
        """Read the runs of a file that has passed :func:`check_file`, into tensors on the CPU of the stored type.

        Raises:
            CheckpointError: The file cannot be read.
        """
        try:
            with self.path.open("rb", buffering=0) as stream:
                for run in self.runs:
                    read_into(stream.fileno(), run.begin, [run.target])
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {os_reason(error)}") from error

    def _placed(self) -> list[tuple[Piece, list[_Run]]]:
        """The pieces to read, and the runs that have to be copied from the block of each."""
        placed: list[tuple[Piece, list[_Run]]] = []
        upcoming, present = iter(self.runs), list[_Run]()
        following = next(upcoming, None)
        for begin, length in _spans(self.file, self._blocks()):
            while following is not None and following.begin < begin + length:
                present.append(following)
                following = next(upcoming, None)
            # An element that is wanted twice can be read into only one place.
            apart = all(run.end <= later.begin for run, later in pairwise(present))
            direct = [run.part_of(begin, begin + length) for run in present if apart and run.is_straight]
            copied = [run for run in present if not (apart and run.is_straight)]
            placed.append((Piece(begin, length, direct), copied))
            present = [run for run in present if run.end > begin + length]
        return placed

    def _blocks(self) -> list[int]:
        """The blocks that hold the header or a part of a run."""
        size, numbers = self.file.block_bytes, set(range(-(-self.header_bytes // self.file.block_bytes)))
        for run in self.runs:
            numbers.update(range(run.begin // size, -(-run.end // size)))
        return sorted(numbers)


def _spans(file: FileEntry, numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """First byte and number of bytes of the pieces of some blocks; a block of more than ``BLOCK_BYTES`` has several."""
    for number in numbers:
        begin, length = file.block(number)
        for at in range(begin, begin + length, BLOCK_BYTES):
            yield at, min(BLOCK_BYTES, begin + length - at)


def _checked(path: Path, file: FileEntry, pieces: Sequence[Piece]) -> Iterator[torch.Tensor]:
    """Read blocks of a file, given by all their pieces in order, and compare them with their checksums.

    Yields:
        The block of memory of each piece, valid until the next one is asked for. Only the last piece of a block tells
        that the block is right.

    Raises:
        CheckpointError: The file cannot be read, or a block differs from its checksum.
    """
    crc = 0
    try:
        for piece, memory, parts in read_ahead(path, pieces):
            for part in parts:
                crc = crc32(part.numpy().data, crc)
            end = piece.begin + piece.length
            number = (end - 1) // file.block_bytes
            begin, length = file.block(number)
            if end == begin + length:
                if crc != file.crcs[number]:
                    raise CheckpointError(
                        f"{path}: corrupt: the CRC-32 of bytes {begin} to {end} is {crc:08x}, the manifest says "
                        f"{file.crcs[number]:08x}"
                    )
                crc = 0
            yield memory
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {os_reason(error)}") from error
