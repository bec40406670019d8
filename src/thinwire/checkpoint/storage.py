"""Sharded vectors into safetensors files and back.

A file holds at most one span of each vector, and at most :data:`FILE_BYTES` bytes of elements. The ``safetensors``
library makes a file's bytes; this module writes them, so that a failure is an ``OSError`` with its number, the file
gets the permissions of the process, and the bytes are on disk before the file counts as written. Reading opens each
file once and copies only the wanted elements out of it.

The header says where each span lies in its vector, in the metadata of ``torch.distributed.checkpoint``: its
``HuggingFaceStorageReader`` loads these files as well.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import torch

from thinwire.checkpoint.manifest import FileEntry, Manifest, StoredSpan, check_header

FILE_BYTES: Final = 256 << 20
"""Largest number of bytes of elements in a file. A rank holds one file's bytes in memory while it writes."""

_FILE_NAME: Final = "shard-{:05}-model-00001-of-00001.safetensors"
"""Name of a file by its number, which counts from 1; ``torch.distributed.checkpoint`` names shards this way."""


@final
@dataclass(frozen=True)
class Chunk:
    """A fragment, held by this rank, of a global flat vector.

    Attributes:
        offset: index of its first element in the vector.
        tensor: its elements: one-dimensional and contiguous, on any device, often a view of a larger buffer.
            Read when saving, written in place when loading. May be empty.
    """

    offset: int
    tensor: torch.Tensor


@final
@dataclass(frozen=True)
class ShardedVector:
    """A global flat vector and the parts of it that this rank holds.

    Attributes:
        numel: length of the whole vector, equal on all ranks.
        chunks: this rank's parts, in any order. A rank may hold none.
    """

    numel: int
    chunks: tuple[Chunk, ...]


@final
@dataclass(frozen=True)
class WrittenFile:
    """A file that a rank has written.

    Attributes:
        entry: its name, size in bytes and checksum.
        pieces: key, offset and length in elements of each span that it holds.
    """

    entry: FileEntry
    pieces: list[tuple[str, int, int]]


@final
@dataclass(frozen=True)
class PackedPiece:
    """A part of a chunk that fits in one file.

    Attributes:
        key: name of the vector.
        offset: index of its first element in the vector.
        tensor: its elements: one-dimensional, contiguous, not empty.
    """

    key: str
    offset: int
    tensor: torch.Tensor


def _cut(vectors: Mapping[str, ShardedVector]) -> Iterator[PackedPiece]:
    """Cut this rank's chunks into pieces of at most :data:`FILE_BYTES`; empty chunks leave none."""
    for key, vector in vectors.items():
        for chunk in vector.chunks:
            step = max(1, FILE_BYTES // chunk.tensor.itemsize)
            for start in range(0, chunk.tensor.numel(), step):
                piece = chunk.tensor.detach()[start : start + step]
                yield PackedPiece(key, chunk.offset + start, piece)


def pack(vectors: Mapping[str, ShardedVector]) -> list[list[PackedPiece]]:
    """Distribute this rank's chunks over files of at most :data:`FILE_BYTES`, a key at most once per file.

    Args:
        vectors: by key.

    Returns:
        The pieces of each file. Empty chunks leave no piece and no file.
    """
    files: list[list[PackedPiece]] = []
    sizes: list[int] = []
    first_open = 0
    next_file: dict[str, int] = {}
    for piece in _cut(vectors):
        num_bytes = piece.tensor.numel() * piece.tensor.itemsize
        index = max(first_open, next_file.get(piece.key, 0))
        while index < len(files) and sizes[index] + num_bytes > FILE_BYTES:
            index += 1
        if index == len(files):
            files.append([])
            sizes.append(0)
        files[index].append(piece)
        sizes[index] += num_bytes
        next_file[piece.key] = index + 1
        while first_open < len(files) and sizes[first_open] >= FILE_BYTES:
            first_open += 1
    return files


def write_file(directory: Path, number: int, pieces: Sequence[PackedPiece]) -> WrittenFile:
    """Write one safetensors file and make it durable.

    Args:
        directory: an existing directory.
        number: index of the file among the files of all ranks, from 0.
        pieces: contents of the file, each of another key.

    Returns:
        The file's name, size and checksum, and the spans that it holds. The checksum is that of the bytes in memory,
        so it also exposes bytes that change on their way to the disk.

    Raises:
        OSError: the disk is full, or the file system fails otherwise.
        CheckpointError: :func:`read_chunks` would not accept the file.
    """
    path = directory / _FILE_NAME.format(number + 1)
    raw = _encode(pieces)
    with path.open("xb") as stream:
        stream.write(raw)
        stream.flush()
        os.fsync(stream.fileno())
    contents = {
        piece.key: (piece.tensor.dtype, StoredSpan(piece.offset, piece.tensor.numel(), number)) for piece in pieces
    }
    # Another version of the library may describe the same tensors differently: better refused now than when loading.
    check_header(path, len(raw), contents)
    located = [(piece.key, piece.offset, piece.tensor.numel()) for piece in pieces]
    return WrittenFile(FileEntry(path.name, len(raw), zlib.crc32(raw)), located)


def _encode(pieces: Sequence[PackedPiece]) -> bytes:
    """Return the bytes of a safetensors file that holds the pieces and their offsets."""
    from safetensors.torch import save  # here, so that a program that saves nothing does not load it

    offsets = {piece.key: {"saved_offsets": [piece.offset]} for piece in pieces}
    metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    return save(_without_overlap(pieces), metadata)


def _without_overlap(pieces: Sequence[PackedPiece]) -> dict[str, torch.Tensor]:
    """Give the pieces on the CPU, by key, copied where they share memory, which safetensors refuses.

    Tied parameters and views share memory; neighbours in one buffer do not.
    """
    tensors = {piece.key: piece.tensor.detach().cpu() for piece in pieces}
    end = 0
    for key, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:
            tensors[key] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.numel() * tensor.itemsize)
    return tensors


@final
@dataclass(frozen=True)
class _Copy:
    """Elements to copy from a file.

    Attributes:
        key: name of the vector.
        start: index in the stored span of the first element.
        target: where the elements go: a part of a chunk.
    """

    key: str
    start: int
    target: torch.Tensor


def read_chunks(directory: Path, manifest: Manifest, vectors: Mapping[str, ShardedVector]) -> None:
    """Copy the wanted elements from verified files into the chunks.

    Args:
        directory: the checkpoint.
        manifest: its table of contents. Every file that holds wanted elements has passed
            :func:`~thinwire.checkpoint.manifest.check_file`.
        vectors: what is wanted, of lengths and element types that fit the manifest.

    Raises:
        OSError: a file cannot be opened.
    """
    from safetensors import safe_open  # here, so that a program that loads nothing does not load it

    for file, copies in _by_file(manifest, vectors).items():
        with safe_open(directory / manifest.files[file].name, framework="pt") as stored:
            for copy in copies:
                copy.target.copy_(stored.get_slice(copy.key)[copy.start : copy.start + copy.target.numel()])


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
