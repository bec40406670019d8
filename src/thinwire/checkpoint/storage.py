"""Sharded vectors into safetensors files and back, by the storage of ``torch.distributed.checkpoint``.

The storage is driven through its public planner, writer and reader interfaces, one file at a time while
writing, with what is known of its habits:

- Its writer keeps only the last of several parts of one key in a file: here a key occurs once per file.
- Its writer calls fsync before the last bytes have left Python's buffer: files are synchronised here again.
- Its writer copies a file's tensors three times in memory: files are of bounded size.
- Its reader takes whatever safetensors files it finds for all of them, and leaves elements that none holds
  as they are: here it is told the files and their contents, which the caller has verified.

The files are ordinary sharded safetensors files; ``HuggingFaceStorageReader`` alone can load them too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from thinwire.checkpoint.manifest import FileEntry, Manifest, StoredSpan, check_header, crc32_of

FILE_BYTES: Final = 256 << 20
"""Bytes of elements per file, at most. The writer needs about three times as much memory for a moment."""


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
        chunks: this rank's parts, in any order; none is ordinary.
    """

    numel: int
    chunks: tuple[Chunk, ...]


@final
@dataclass(frozen=True)
class WrittenFile:
    """A file that a rank has written, and the key, offset and length of the pieces in it."""

    entry: FileEntry
    pieces: list[tuple[str, int, int]]


@final
@dataclass(frozen=True)
class PackedPiece:
    """A part of a chunk that fits in a file: elements from ``offset`` on of the vector ``key``."""

    key: str
    numel: int
    offset: int
    tensor: torch.Tensor


@final
@dataclass(frozen=True)
class _Stored:
    """Where ``HuggingFaceStorageReader`` finds a part of a vector."""

    relative_path: str
    shape: torch.Size
    dtype: torch.dtype


def _cut(vectors: Mapping[str, ShardedVector]) -> Iterator[PackedPiece]:
    """Cut this rank's chunks into pieces of at most :data:`FILE_BYTES`; empty chunks leave none."""
    for key, vector in vectors.items():
        for chunk in vector.chunks:
            step = max(1, FILE_BYTES // chunk.tensor.itemsize)
            for start in range(0, chunk.tensor.numel(), step):
                piece = chunk.tensor.detach()[start : start + step]
                yield PackedPiece(key, vector.numel, chunk.offset + start, piece)


def pack(vectors: Mapping[str, ShardedVector]) -> list[list[PackedPiece]]:
    """Deal this rank's chunks to files of at most :data:`FILE_BYTES`, a key at most once per file.

    Args:
        vectors: by key.

    Returns:
        What each file is to hold; nothing, and no file, for empty chunks.
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
    """Write one safetensors file, make it durable, and check what the storage made of it.

    Args:
        directory: where; it exists.
        number: distinguishes the file from those of all ranks.
        pieces: what it holds, each of another key.

    Returns:
        Its name, size and checksum, and what is in it.

    Raises:
        OSError: the disk is full, or another failure of the file system.
        CheckpointError: the storage has written something else than it was given.
    """
    items = [
        WriteItem(
            index=MetadataIndex(piece.key, torch.Size([piece.offset])),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size([piece.offset]), piece.tensor.shape),
                properties=TensorProperties(dtype=piece.tensor.dtype),
                size=torch.Size([piece.numel]),
            ),
        )
        for piece in pieces
    ]
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(SavePlan(items))
    # The storage names a file after its plan's place in the list.
    plan = writer.prepare_global_plan([SavePlan([])] * number + [plan])[number]
    results = writer.write_data(plan, _Source(pieces)).wait()
    (name,) = {result.storage_data.relative_path for result in results}

    path = directory / name
    with path.open("r+b") as stream:
        os.fsync(stream.fileno())
    size = path.stat().st_size
    contents = {
        piece.key: (piece.tensor.dtype, StoredSpan(piece.offset, piece.tensor.numel(), number)) for piece in pieces
    }
    check_header(path, size, contents)
    located = [(piece.key, piece.offset, piece.tensor.numel()) for piece in pieces]
    return WrittenFile(FileEntry(name, size, crc32_of(path)), located)


@final
class _Source(DefaultSavePlanner):
    """Hands the storage writer the tensors of one file."""

    def __init__(self, pieces: Iterable[PackedPiece]) -> None:
        super().__init__()
        self._tensors = {piece.key: piece.tensor for piece in pieces}
        self._storages: set[int] = set()

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        tensor = self._tensors[write_item.index.fqn]
        # safetensors refuses two names of one storage in a file, which tied parameters and views are.
        storage = tensor.untyped_storage().data_ptr()
        if tensor.is_cpu and storage in self._storages:
            return tensor.clone()
        self._storages.add(storage)
        return tensor


def read_chunks(directory: Path, manifest: Manifest, vectors: Mapping[str, ShardedVector]) -> None:
    """Copy the wanted elements from verified files into the chunks.

    Args:
        directory: the checkpoint.
        manifest: its contents; every file that holds wanted elements has passed
            :func:`~thinwire.checkpoint.manifest.check_file`.
        vectors: what is wanted, of lengths and element types that fit the manifest.
    """
    stored: dict[MetadataIndex, _Stored] = {}
    items: list[ReadItem] = []
    tensors: dict[str, list[torch.Tensor]] = {}
    for key, vector in vectors.items():
        chunks = [chunk for chunk in vector.chunks if chunk.tensor.numel()]
        if not chunks:
            continue
        entry = manifest.vectors[key]
        assert entry.dtype is not None
        for span in entry.spans:
            place = _Stored(str(directory / manifest.files[span.file].name), torch.Size([span.length]), entry.dtype)
            stored[MetadataIndex(key, torch.Size([span.offset]))] = place
        table = TensorStorageMetadata(
            TensorProperties(dtype=entry.dtype),
            torch.Size([entry.numel]),
            [ChunkStorageMetadata(torch.Size([span.offset]), torch.Size([span.length])) for span in entry.spans],
        )
        wanted = [ChunkStorageMetadata(torch.Size([chunk.offset]), chunk.tensor.shape) for chunk in chunks]
        reads = create_read_items_for_chunk_list(key, table, wanted)
        num_read = sum(item.lengths[0] for item in reads)
        num_wanted = sum(chunk.tensor.numel() for chunk in chunks)
        assert num_read == num_wanted, f"{key}: the plan reads {num_read} of {num_wanted} elements"
        items += reads
        tensors[key] = [chunk.tensor for chunk in chunks]
    reader = HuggingFaceStorageReader(str(directory))
    reader.set_up_storage_reader(Metadata({}, storage_data=stored), True)
    plan = reader.prepare_local_plan(LoadPlan(items))
    (plan,) = reader.prepare_global_plan([plan])
    reader.read_data(plan, _Destination(tensors)).wait()


@final
class _Destination(DefaultLoadPlanner):
    """Shows the storage reader where the elements go."""

    def __init__(self, tensors: Mapping[str, Sequence[torch.Tensor]]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index.index
        assert index is not None
        chunk = self._tensors[read_item.dest_index.fqn][index].detach()
        return chunk.narrow(0, read_item.dest_offsets[0], read_item.lengths[0])

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass
