"""What each rank says of its part of a save, and whether all parts make whole vectors. Nothing here communicates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch

from thinwire.agreement import Typed
from thinwire.checkpoint import manifest as _manifest
from thinwire.checkpoint.storage import ShardedVector, pack
from thinwire.checkpoint.strict_json import Json, dump_value
from thinwire.errors import CheckpointError


@final
@dataclass(frozen=True)
class Contribution:
    """One rank's part of a save: lengths, types and spans of its vectors, values as JSON, number of files."""

    vectors: dict[str, tuple[int, str | None, list[tuple[int, int]]]]
    values: dict[str, str]
    num_files: int


CONTRIBUTION: Final[Typed[Contribution]] = Typed(Contribution)


def describe(vectors: Mapping[str, ShardedVector], values: Mapping[str, Json]) -> Contribution:
    described = {}
    for key, vector in vectors.items():
        _manifest.check_key(key)
        check_chunks(key, vector)
        dtypes = {chunk.tensor.dtype for chunk in vector.chunks}
        if len(dtypes) > 1:
            names = sorted(map(_manifest.dtype_name, dtypes))
            raise CheckpointError(f"vector {key!r}: its chunks have different types: {', '.join(names)}")
        spans = [(chunk.offset, chunk.tensor.numel()) for chunk in vector.chunks if chunk.tensor.numel()]
        described[key] = (vector.numel, _manifest.dtype_name(dtypes.pop()) if dtypes else None, spans)
    texts = {}
    for key, value in values.items():
        if not isinstance(key, str):
            raise CheckpointError(f"value {key!r}: its key is not a string")
        texts[key] = dump_value(value, f"value {key!r}")
    return Contribution(described, texts, len(pack(vectors)))


def check_chunks(key: str, vector: ShardedVector) -> None:
    for chunk in vector.chunks:
        tensor = chunk.tensor
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise CheckpointError(
                f"vector {key!r}: a chunk of shape {list(tensor.shape)} and strides {list(tensor.stride())} "
                "is not one-dimensional and contiguous"
            )
        if tensor.dtype not in _manifest.SAFETENSORS_CODES:
            names = ", ".join(map(_manifest.dtype_name, _manifest.SAFETENSORS_CODES))
            raise CheckpointError(f"vector {key!r}: {tensor.dtype} cannot be stored; valid are {names}")
        if not 0 <= chunk.offset <= chunk.offset + tensor.numel() <= vector.numel:
            raise CheckpointError(
                f"vector {key!r}: a chunk of elements {chunk.offset} to {chunk.offset + tensor.numel()} "
                f"is no part of 0 to {vector.numel}"
            )


def merge_vectors(
    contributions: Sequence[Mapping[str, tuple[int, str | None, list[tuple[int, int]]]]], doing: str
) -> tuple[dict[str, int], dict[str, torch.dtype | None]]:
    """Check that the ranks agree on every vector and cover it exactly once.

    All ranks check the same data, so they raise together without another exchange.
    """
    numels: dict[str, int] = {}
    dtypes: dict[str, torch.dtype | None] = {}
    spans: dict[str, list[tuple[int, int]]] = {}
    for rank, vectors in enumerate(contributions):
        for key, (numel, name, chunks) in vectors.items():
            dtype = None if name is None else _manifest.DTYPES[name]
            if numels.setdefault(key, numel) != numel:
                raise CheckpointError(
                    f"{doing}: rank {rank} says that vector {key!r} has {numel} elements, "
                    f"a rank before it says {numels[key]}"
                )
            known = dtypes.setdefault(key, dtype)
            if known is None:
                dtypes[key] = dtype
            elif dtype not in (None, known):
                raise CheckpointError(f"{doing}: vector {key!r} is {dtype} on rank {rank}, {known} on a rank before it")
            spans.setdefault(key, []).extend(chunks)
    for key, numel in numels.items():
        _manifest.check_cover(spans[key], numel, f"{doing}: vector {key!r}: of all ranks' chunks, elements")
    return numels, dtypes


def merge_values(contributions: Sequence[Mapping[str, str]], doing: str) -> dict[str, Any]:
    texts: dict[str, str] = {}
    for rank, values in enumerate(contributions):
        for key, text in values.items():
            if texts.setdefault(key, text) != text:
                raise CheckpointError(
                    f"{doing}: value {key!r} on rank {rank} differs from that on a rank before it; "
                    "what belongs to one rank needs a key of its own"
                )
    return {key: json.loads(text) for key, text in texts.items()}
