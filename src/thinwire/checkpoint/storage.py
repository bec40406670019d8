"""Sharded vectors into safetensors files; :mod:`thinwire.checkpoint.reading` is the way back.

A file holds at most one span of each vector, and at most :data:`FILE_BYTES` bytes of elements. This module writes the
format itself, because the ``safetensors`` library makes a file's bytes in memory first, several times over. Here they
go from the tensors to the disk block by block, a failure is an ``OSError`` with its number, the file gets the
permissions of the process, and the bytes are on disk before the file counts as written.

The header says where each span lies in its vector, in the metadata of ``torch.distributed.checkpoint``: its
``HuggingFaceStorageReader`` loads these files as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import torch

from thinwire.checkpoint.blocks import as_bytes, write_durably
from thinwire.checkpoint.manifest import FileEntry
from thinwire.checkpoint.tensor_files import TensorEntry, header

FILE_BYTES: Final = 256 << 20
"""Largest number of bytes of elements in a file."""

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


WrittenFile = tuple[FileEntry, list[tuple[str, int, int]]]
"""A file that a rank has written; and key, offset and length in elements of each span that it holds."""


def _cut(vectors: Mapping[str, ShardedVector]) -> Iterator[tuple[str, Chunk]]:
    """Cut this rank's chunks into pieces of at most :data:`FILE_BYTES`; empty chunks leave none."""
    for key, vector in vectors.items():
        for chunk in vector.chunks:
            step = max(1, FILE_BYTES // chunk.tensor.itemsize)
            for start in range(0, chunk.tensor.numel(), step):
                yield key, Chunk(chunk.offset + start, chunk.tensor.detach()[start : start + step])


def pack(vectors: Mapping[str, ShardedVector]) -> list[dict[str, Chunk]]:
    """Distribute this rank's chunks over files of at most :data:`FILE_BYTES`, a key at most once per file: the pieces
    of each file by key. Empty chunks leave no piece and no file."""
    files: list[dict[str, Chunk]] = []
    sizes: list[int] = []
    first_open = 0
    next_file: dict[str, int] = {}
    for key, piece in _cut(vectors):
        num_bytes = piece.tensor.nbytes
        index = max(first_open, next_file.get(key, 0))
        while index < len(files) and sizes[index] + num_bytes > FILE_BYTES:
            index += 1
        if index == len(files):
            files.append({})
            sizes.append(0)
        files[index][key] = piece
        sizes[index] += num_bytes
        next_file[key] = index + 1
        while first_open < len(files) and sizes[first_open] >= FILE_BYTES:
            first_open += 1
    return files


def write_file(directory: Path, number: int, pieces: Mapping[str, Chunk]) -> WrittenFile:
    """Write pieces, by key, as one safetensors file, whose number among those of all ranks counts from 0, and make it
    durable. Its checksums are those of the bytes in memory, so they also expose bytes that change on their way to
    the disk.

    Raises:
        OSError: the disk is full, or the file system fails otherwise.
    """
    path = directory / _FILE_NAME.format(number + 1)
    # As the library does, so that elements of every type are aligned: the widest types first, then by name.
    ordered = dict(sorted(pieces.items(), key=lambda item: (-item[1].tensor.itemsize, item[0])))
    offsets = {key: {"saved_offsets": [piece.offset]} for key, piece in ordered.items()}
    metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    entries = [TensorEntry(key, piece.tensor.dtype, piece.tensor.shape) for key, piece in ordered.items()]
    elements = (as_bytes(piece.tensor) for piece in ordered.values())
    size, crcs = write_durably(path, [header(entries, metadata), *elements])
    return FileEntry(path.name, size, crcs), [(key, one.offset, one.tensor.numel()) for key, one in pieces.items()]
