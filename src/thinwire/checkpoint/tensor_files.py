"""Safetensors files whose tensors are made one after another, while the file is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch

from thinwire.checkpoint.blocks import as_bytes, write_durably
from thinwire.checkpoint.manifest import SAFETENSORS_CODES

_ORDER: Final = {dtype: place for place, dtype in enumerate(SAFETENSORS_CODES)}


@final
@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file.

    Attributes:
        name: Its name.
        dtype: One of ``SAFETENSORS_CODES``.
        shape: Its shape.
    """

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

    Args:
        entries: All tensors of the file.
        metadata: Texts by name; ``None`` for none.
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


def write_tensors(
    path: Path, entries: Sequence[TensorEntry], read: Callable[[str], torch.Tensor], metadata: Mapping[str, str] | None
) -> None:
    """Write a file to disk, with one or two of its tensors in memory at a time.

    Args:
        path: The file, which does not exist.
        entries: Its tensors in order.
        read: Makes a tensor of the dtype and shape of its entry, on any device.
        metadata: Texts by name; ``None`` for none.

    Raises:
        OSError: The disk is full, or the file system fails otherwise.
    """

    def parts() -> Iterable[torch.Tensor]:
        yield header(entries, metadata)
        for entry in entries:
            yield as_bytes(read(entry.name).detach().contiguous().view(-1))

    write_durably(path, parts())
