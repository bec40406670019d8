"""Parts: what one rank publishes of one version of the weights.

A version has a part from every rank, and two kinds. A *delta* says what turns the weights of its parent, an earlier
version, into its own; an *anchor* holds all weights by itself. Parts of one publisher's life belong to a *run*. The
name of a part says all of this, so that a listing of the store says which versions are complete:

``RUN.VERSION.PARENT.KIND.PART-PARTS.weights``

A part is a head in JSON and one message for each dtype. A checksum in front covers all of it, and deltas are verified
value by value when they are applied.
"""

from __future__ import annotations

import math
import re
import secrets
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Self

import torch
from zlib_ng import zlib_ng

from thinwire import codecs
from thinwire.agreement import Typed
from thinwire.codecs.delta import NUMBERS, Delta
from thinwire.errors import CollectiveError, WireError
from thinwire.sharding.memory.local import Slice
from thinwire.sharding.tensors.spec import boxes

Kind = Literal["delta", "anchor"]

Values = Mapping[str, torch.Tensor]
"""Values by the name of their dtype, 1-D, on the CPU: those of all pieces of that dtype, one after another."""

_ANCHOR: Final = "exp3"
"""The codec of bf16 values in anchors: exact, some 11 of 16 bits."""

_MAGIC: Final = b"TWW1"
_FRONT: Final = "<4sIQ"
"""Magic, checksum of everything after the front, bytes of the head."""

_DTYPES: Final = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    )
    if hasattr(torch, name)
}
"""Dtypes that torch copies, by name. What a part says is looked up nowhere else."""

_NAME: Final = re.compile(r"(\d{6}-[0-9a-f]{8})\.(\d{9})\.(\d{9})\.(delta|anchor)\.(\d{5})-(\d{5})\.weights")

_FILE: Final = re.compile(rf"(?:{_NAME.pattern}|\d{{6}}-[0-9a-f]{{8}}\.wanted)(?:\w{{8}})?")
"""A part, or a request for an anchor, or a draft of one, whose name has eight characters more."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of one tensor, or of a slice of it.

    Attributes:
        name: Name of the tensor, as in the model's state dict.
        shape: Shape of the whole tensor.
        dtype: Its dtype, as ``"bfloat16"``.
        offset: First element, in the flattened slice.
        numel: Number of elements.
        cut: Slice of the tensor that the elements are of; ``None`` for the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    numel: int
    cut: Slice | None = None

    @property
    def kind(self) -> torch.dtype:
        """The dtype."""
        kind: torch.dtype = _DTYPES[self.dtype]
        return kind

    @property
    def is_possible(self) -> bool:
        """Whether there are such tensors, and such elements of them."""
        cut = self.cut or Slice(0, 1, 0)
        if min(*self.shape, self.offset, self.numel, cut.dim, cut.index, 0) < 0 or cut.index >= cut.ways:
            return False
        if self.cut is not None and (cut.dim >= len(self.shape) or self.shape[cut.dim] % cut.ways):
            return False
        if self.dtype not in _DTYPES or math.prod(size or 1 for size in self.shape) * self.kind.itemsize >= 1 << 63:
            return False
        return self.offset + self.numel <= math.prod(self.shape) // cut.ways

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its elements of the tensor, 1-D."""
        return self._region(tensor).reshape(-1)[self.offset : self.offset + self.numel]

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Put its elements, 1-D, into the tensor."""
        region = self._region(tensor)
        for box in boxes(region.shape, self.offset, self.numel):
            place = tuple(slice(first, first + size) for first, size in zip(box.offsets, box.sizes, strict=True))
            region[place].copy_(values[box.start : box.start + box.numel].view(box.sizes))

    def _region(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.cut is None:
            return tensor
        size = tensor.shape[self.cut.dim] // self.cut.ways
        return tensor.narrow(self.cut.dim, self.cut.index * size, size)


@dataclass(frozen=True, slots=True, order=True)
class Name:
    """What the name of a part says.

    Attributes:
        run: The publisher's life. Its number is larger than that of any run that was there when it began.
        version: Number of the version, from 1, or after that of any earlier run that was there when this one began.
        parent: The version that a delta begins from; 0 for an anchor.
        kind: Kind of the part.
        part: Number of the part, from 0.
        parts: Parts of the version.
    """

    run: str
    version: int
    parent: int
    kind: Kind
    part: int
    parts: int

    def __str__(self) -> str:
        """The name, of a form that sorts by run and version."""
        place = f"{self.part:05}-{self.parts:05}"
        return f"{self.run}.{self.version:09}.{self.parent:09}.{self.kind}.{place}.weights"

    @classmethod
    def read(cls, text: str) -> Self | None:
        """The name that a text is; ``None`` if it is none."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        run, version, parent, kind, part, parts = match.groups()
        name = cls(run, int(version), int(parent), "delta" if kind == "delta" else "anchor", int(part), int(parts))
        return name if name.part < name.parts and name.parent < name.version else None


def new_run(names: Collection[Name]) -> tuple[str, int]:
    """The name of a run that begins now, after all that have these parts, and their last version, which its own come
    after: a number alone says which version is meant. Of two that begin at once, one comes after the other by
    chance."""
    number = 1 + max((int(name.run.partition("-")[0]) for name in names), default=0)
    return f"{number:06}-{secrets.token_hex(4)}", max((name.version for name in names), default=0)


def run_of(text: str) -> str:
    """The run that a file of this name belongs to, be it a part, a request or a draft; empty if none."""
    match = _FILE.fullmatch(text)
    return "" if match is None else text.partition(".")[0]


def wanted(run: str) -> str:
    """The name of a file by which a receiver asks a run for an anchor."""
    return f"{run}.wanted"


def complete(names: Iterable[Name]) -> dict[tuple[str, int, int, Kind], list[Name]]:
    """The versions all of whose parts are there, by run, version, parent and kind; parts in order."""
    found: dict[tuple[str, int, int, Kind], dict[int, Name]] = {}
    for name in names:
        found.setdefault((name.run, name.version, name.parent, name.kind), {})[name.part] = name
    versions = {key: [parts[number] for number in sorted(parts)] for key, parts in found.items()}
    return {key: parts for key, parts in sorted(versions.items()) if len(parts) == parts[0].parts}


@dataclass(frozen=True, slots=True)
class _Head:
    step: int
    pieces: tuple[Piece, ...]
    messages: tuple[tuple[str, int], ...]  # dtype and bytes, in order


_HEAD: Final[Typed[_Head]] = Typed(_Head)


def encode(step: int, pieces: Sequence[Piece], old: Values | None, new: Values) -> bytes:
    """A part.

    Args:
        step: Optimizer steps that made these values.
        pieces: Its pieces; those of one dtype in the order of its values.
        old: Values of the parent; ``None`` makes an anchor. Dtypes without deltas travel as they are.
        new: Values of this version.
    """
    messages = [(dtype, _message(None if old is None else old[dtype], values)) for dtype, values in new.items()]
    head = _HEAD.encode(_Head(step, tuple(pieces), tuple((dtype, len(message)) for dtype, message in messages)))
    rest = b"".join((head, *(message for _, message in messages)))
    return struct.pack(_FRONT, _MAGIC, zlib_ng.crc32(rest), len(head)) + rest


def decode(data: bytes) -> tuple[int, tuple[Piece, ...], dict[str, memoryview]]:
    """The step, the pieces, and the messages of a part by dtype.

    Raises:
        WireError: The bytes are truncated, damaged, or no part.
    """
    front = struct.calcsize(_FRONT)
    if len(data) < front:
        raise WireError(f"{len(data)} bytes are no part of weights")
    magic, checksum, head_bytes = struct.unpack_from(_FRONT, data)
    rest = memoryview(data)[front:]
    if magic != _MAGIC or head_bytes > len(rest) or zlib_ng.crc32(rest) != checksum:
        raise WireError("a part of weights is truncated or damaged, or it is another file")
    try:
        head = _HEAD.decode(bytes(rest[:head_bytes]))
    except CollectiveError as error:
        raise WireError(f"the head of a part of weights says nothing that can be read: {error}") from error
    if unknown := [dtype for dtype, _ in head.messages if dtype not in _DTYPES]:
        raise WireError(f"a part of weights is of dtype {unknown[0]!r}, and this torch has {', '.join(_DTYPES)}")
    messages, at = {}, head_bytes
    for dtype, nbytes in head.messages:
        messages[dtype] = rest[at : at + nbytes]
        at += nbytes
    if at != len(rest) or not all(piece.dtype in messages and piece.is_possible for piece in head.pieces):
        raise WireError("the messages of a part of weights are not those that its head names")
    return head.step, head.pieces, messages


def take(dtype: str, message: memoryview, numel: int, old: torch.Tensor | None) -> torch.Tensor:
    """The values that a message makes, 1-D; that of a delta from the ``old`` values of its parent.

    Raises:
        WireError: It was made against other values, or is damaged.
    """
    kind: torch.dtype = _DTYPES[dtype]
    raw = (
        torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if len(message)
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    if old is None and kind is torch.bfloat16 and 0 < numel <= len(message):
        return codecs.get(_ANCHOR).decode(raw, numel, kind)
    if old is None or kind not in NUMBERS:
        if raw.numel() != numel * kind.itemsize:
            raise WireError(f"{raw.numel()} bytes are not {numel} values of {dtype}")
        if kind is torch.bool and (raw > 1).any():
            raise WireError("values of bool are bytes other than 0 and 1")
        return raw.view(kind)
    return Delta().apply(old, raw)


def _message(old: torch.Tensor | None, new: torch.Tensor) -> bytes:
    if old is None and new.dtype is torch.bfloat16:
        return codecs.get(_ANCHOR).encode(new).numpy().tobytes()
    if old is None or new.dtype not in NUMBERS:
        return new.contiguous().view(torch.uint8).numpy().tobytes()
    return Delta().encode(old, new).numpy().tobytes()


def split(values: torch.Tensor, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, torch.Tensor]]:
    """The pieces of one dtype with their values."""
    at = 0
    for piece in pieces:
        yield piece, values[at : at + piece.numel]
        at += piece.numel
