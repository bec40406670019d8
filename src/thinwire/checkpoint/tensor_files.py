"""Safetensors files: their headers, written and compared with a manifest; and files whose tensors are made one after
another, while the file is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch

from thinwire.checkpoint.blocks import as_bytes, write_durably
from thinwire.checkpoint.manifest import SAFETENSORS_CODES, StoredSpan, check_cover, os_reason
from thinwire.checkpoint.strict_json import as_integers, as_object, dump, parse
from thinwire.errors import CheckpointError

_MAX_HEADER_BYTES: Final = 100_000_000  # safetensors refuses longer ones
_ORDER: Final = {dtype: place for place, dtype in enumerate(SAFETENSORS_CODES)}


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
