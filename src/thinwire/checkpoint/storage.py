"""Safetensors files: their headers, and what is written into them, sharded vectors or tensors one after another;
:mod:`thinwire.checkpoint.reading` is the way back.

A file of a checkpoint holds at most one span of each vector, and at most :data:`FILE_BYTES` bytes of elements. This
module writes the format itself, because the ``safetensors`` library makes a file's bytes in memory first, several times
over. Here they go from the tensors to the disk block by block, a failure is an ``OSError`` with its number, the file
gets the permissions of the process, and the bytes are on disk before the file counts as written.

The header says where each span lies in its vector, in the metadata of ``torch.distributed.checkpoint``: its
``HuggingFaceStorageReader`` loads these files as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch

from thinwire.checkpoint.blocks import as_bytes, write_durably
from thinwire.checkpoint.manifest import SAFETENSORS_CODES, FileEntry, StoredSpan, check_cover, os_reason
from thinwire.checkpoint.strict_json import as_integers, as_object, dump, parse
from thinwire.errors import CheckpointError

FILE_BYTES: Final = 256 << 20
"""Largest number of bytes of elements in a file."""

_FILE_NAME: Final = "shard-{:05}-model-00001-of-00001.safetensors"
"""Name of a file by its number, which counts from 1; ``torch.distributed.checkpoint`` names shards this way."""


_MAX_HEADER_BYTES: Final = 100_000_000  # safetensors refuses longer ones
_ORDER: Final = {dtype: place for place, dtype in enumerate(SAFETENSORS_CODES)}


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


# -- files of tensors -----------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file, whose dtype is one of ``SAFETENSORS_CODES``."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]

    @property
    def num_bytes(self) -> int:
        """Size of its elements in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def in_library_order(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Tensors in the order of the library ``safetensors``, whose files then have the same bytes."""
    return sorted(entries, key=lambda entry: (_ORDER[entry.dtype], entry.name))


def header(entries: Iterable[TensorEntry], metadata: Mapping[str, str] | None) -> torch.Tensor:
    """The bytes of a safetensors file before its elements, which follow in the order of the entries.

    https://github.com/huggingface/safetensors#format
    """
    table: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.num_bytes
        code = SAFETENSORS_CODES[entry.dtype]
        table[entry.name] = {"dtype": code, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)


def check_header(path: Path, size: int, contents: Mapping[str, tuple[torch.dtype, StoredSpan]]) -> dict[str, int]:
    """Check that the header of a file of ``size`` bytes describes these contents, without gaps, overlaps or excess.

    Returns:
        The byte of the file at which the elements of each key begin.

    Raises:
        CheckpointError: The header is malformed or contradicts the manifest.
    """
    # The names are known, so the header's length is bounded before it is read.
    bound = min(_MAX_HEADER_BYTES, 4096 + sum(16 * len(key.encode()) + 512 for key in contents))
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(bound, size - 8):
                raise CheckpointError(f"{path}: corrupt: a header of {length} bytes in a file of {size}")
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {os_reason(error)}") from error
    where = f"{path}: header"
    table = as_object(parse(raw, where), where, {"__metadata__", *contents})
    metadata = as_object(table.pop("__metadata__"), f"{where}: __metadata__", None)
    sharding = metadata.get("DCP_SHARDING_INFO")
    if type(sharding) is not str:
        raise CheckpointError(f"{where}: corrupt: it does not say which part of each vector the file holds")
    offsets = as_object(parse(sharding.encode("utf-8", "replace"), where), f"{where}: DCP_SHARDING_INFO", set(contents))
    ranges, begins = [], {}
    for key, (dtype, span) in contents.items():
        entry = as_object(table[key], f"{where}: {key!r}", {"dtype", "shape", "data_offsets"})
        saved = as_object(offsets[key], f"{where}: {key!r}", {"saved_offsets"})
        expected = {"dtype": SAFETENSORS_CODES[dtype], "shape": [span.length], "saved_offsets": [span.offset]}
        actual = {"dtype": entry["dtype"], "shape": entry["shape"], **saved}
        if dump(actual) != dump(expected):
            raise CheckpointError(f"{where}: corrupt: {key!r} is {actual}, the manifest says {expected}")
        begin, end = as_integers(entry["data_offsets"], 2, f"{where}: data_offsets of {key!r}")
        if end - begin != span.length * dtype.itemsize:
            raise CheckpointError(f"{where}: corrupt: {key!r} lies in bytes {begin} to {end}, too few or too many")
        if (8 + length + begin) % dtype.itemsize:
            raise CheckpointError(f"{where}: corrupt: {key!r} begins at byte {begin}, within an element")
        ranges.append((begin, end - begin))
        begins[key] = 8 + length + begin
    check_cover(ranges, size - 8 - length, f"{where}: corrupt: data bytes")
    return begins


def write_tensors(
    path: Path, entries: Sequence[TensorEntry], read: Callable[[str], torch.Tensor], metadata: Mapping[str, str] | None
) -> None:
    """Write a file, which does not exist, to disk, with one or two of its tensors in memory at a time: ``read`` makes
    each by its name, on any device.

    Raises:
        OSError: The disk is full, or the file system fails otherwise.
    """

    def parts() -> Iterable[torch.Tensor]:
        yield header(entries, metadata)
        for entry in entries:
            yield as_bytes(read(entry.name).detach().contiguous().view(-1))

    write_durably(path, parts())
