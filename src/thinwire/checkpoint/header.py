"""Compares the header of a safetensors file with the manifest of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from thinwire.checkpoint.manifest import SAFETENSORS_CODES, StoredSpan, check_cover, os_reason
from thinwire.checkpoint.strict_json import as_integers, as_object, dump, parse
from thinwire.errors import CheckpointError

_MAX_HEADER_BYTES: Final = 100_000_000  # safetensors refuses longer ones


def check_header(path: Path, size: int, contents: Mapping[str, tuple[torch.dtype, StoredSpan]]) -> dict[str, int]:
    """Check that a safetensors header describes exactly ``contents``, without gaps, overlaps or excess.

    Args:
        path: The file.
        size: Size of the file in bytes.
        contents: Span of every key that the file should hold.

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
    header = as_object(parse(raw, where), where, {"__metadata__", *contents})
    metadata = as_object(header.pop("__metadata__"), f"{where}: __metadata__", None)
    sharding = metadata.get("DCP_SHARDING_INFO")
    if type(sharding) is not str:
        raise CheckpointError(f"{where}: corrupt: it does not say which part of each vector the file holds")
    offsets = as_object(parse(sharding.encode("utf-8", "replace"), where), f"{where}: DCP_SHARDING_INFO", set(contents))
    ranges, begins = [], {}
    for key, (dtype, span) in contents.items():
        entry = as_object(header[key], f"{where}: {key!r}", {"dtype", "shape", "data_offsets"})
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
