"""The messages of :class:`thinwire.codecs.delta.Delta` in plain NumPy: what native code is compared with.
``docs/wire-format.md`` specifies the bytes.

Suffixes: N values of a block, R runs of zeros, C classes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinwire.codecs.delta import BLOCK, NUMBERS
from thinwire.errors import WireError

Words = npt.NDArray[Any]

MAGIC, VERSION = 0x4C445754, 1
"""``TWDL``."""

HEAD, INDEX = "<IBBBBQQ", "<IIQ"
"""Magic, version, number of the dtype, log2 of the block, 0, values, bytes of the message; then for each block its
bytes, their checksum, and the checksum of the values that they make."""


@dataclass(frozen=True, slots=True)
class DeltaFormat:
    """A dtype as words of ``nbytes``: its number in messages, and where the bits of the exponent are."""

    number: int
    nbytes: int
    shift: int
    mask: int


_EXPONENTS: Final = {
    torch.float32: (23, 0xFF),
    torch.bfloat16: (7, 0xFF),
    torch.float16: (10, 0x1F),
    torch.float8_e4m3fn: (3, 0x0F),
    torch.float8_e5m2: (2, 0x1F),
}

FORMATS: Final = {dtype: DeltaFormat(n, dtype.itemsize, *_EXPONENTS[dtype]) for dtype, n in NUMBERS.items()}

_UNARY: Final = 20
"""A quotient of so many and more is written as so many ones, and the number in 32 bits."""


def encode(old: Tensor, new: Tensor, *, block: int = BLOCK) -> Tensor:
    """The message that turns ``old`` into ``new``; see :meth:`thinwire.codecs.delta.Delta.encode`."""
    form, numel = FORMATS[old.dtype], old.numel()
    before, after = _words(old, form), _words(new, form)
    bodies, index = [], b""
    for first in range(0, numel, block):
        a, b = before[first : first + block], after[first : first + block]
        body = _coded(a, b, form)
        bodies.append(body if len(body) < b.nbytes else b.tobytes())
        index += struct.pack(INDEX, len(bodies[-1]), checksum(bodies[-1]) & 0xFFFFFFFF, checksum(b.tobytes()))
    size = struct.calcsize(HEAD) + len(index) + 8 + sum(map(len, bodies))
    head = struct.pack(HEAD, MAGIC, VERSION, form.number, block.bit_length() - 1, 0, numel, size) + index
    message = head + struct.pack("<Q", checksum(head)) + b"".join(bodies)
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def apply(old: Tensor, message: Tensor) -> Tensor:
    """The new tensor; see :meth:`thinwire.codecs.delta.Delta.apply`."""
    form, data = FORMATS[old.dtype], message.numpy().tobytes()
    before, after = _words(old, form), []
    blocks, sizes = _read_head(data, form, old.numel()), 0
    start = struct.calcsize(HEAD) + struct.calcsize(INDEX) * len(blocks.index) + 8
    for i, (size, sent, result) in enumerate(blocks.index):
        body, a = data[start + sizes : start + sizes + size], before[i * blocks.block : (i + 1) * blocks.block]
        sizes += size
        if checksum(body) & 0xFFFFFFFF != sent:
            raise WireError(f"delta: the message is damaged in block {i}")
        b = _decoded(a, body, form)
        if b is None or checksum(b.tobytes()) != result:
            raise WireError(f"delta: the old tensor is not the one that block {i} was made against")
        after.append(b)
    words = np.concatenate(after) if after else before.copy()
    return torch.from_numpy(words.view(np.uint8)).view(old.dtype).view(old.shape)


def checksum(data: bytes) -> int:
    """64 bits of any bytes: 16 lanes of 32 bits, each a chain of multiplications and rotations, folded into one."""
    stripes = np.frombuffer(data + bytes(-len(data) % 64), "<u4").reshape(-1, 16)
    lanes = np.arange(1, 17, dtype=np.uint32) * np.uint32(0x9E3779B1)
    for stripe in stripes:
        lanes += stripe * np.uint32(0x85EBCA77)
        lanes = ((lanes << np.uint32(13)) | (lanes >> np.uint32(19))) * np.uint32(0x9E3779B1)
    folded = len(data)
    for pair in lanes.view("<u8"):
        folded = ((folded ^ int(pair)) * 0x9FB21C651E98DF25) & 0xFFFFFFFFFFFFFFFF
        folded ^= folded >> 32
    return folded


# ------------------------------------------------------------------------------------------------------- messages


@dataclass(frozen=True)
class _Blocks:
    block: int
    index: list[tuple[int, int, int]]


def _read_head(data: bytes, form: DeltaFormat, numel: int) -> _Blocks:
    head = struct.calcsize(HEAD)
    if len(data) < head + 8:
        raise WireError(f"delta: a message starts with {head + 8} bytes, this one has {len(data)}; it is truncated")
    magic, version, number, log, zero, count, size = struct.unpack_from(HEAD, data)
    if magic != MAGIC or version != VERSION or zero != 0 or not 6 <= log <= 20:
        raise WireError("delta: these are not the first bytes of a message of this version")
    if number != form.number or count != numel:
        raise WireError(f"delta: the message is of {count} values of dtype {number}, the old tensor is not")
    blocks = -(-numel >> log)
    end = head + struct.calcsize(INDEX) * blocks
    if size < end + 8 or size > len(data):
        raise WireError(f"delta: the message says it has {size} bytes and {len(data)} are there")
    if struct.unpack_from("<Q", data, end)[0] != checksum(data[:end]):
        raise WireError("delta: the index of the message is damaged")
    index = [struct.unpack_from(INDEX, data, head + struct.calcsize(INDEX) * i) for i in range(blocks)]
    if sum(entry[0] for entry in index) != size - end - 8:
        raise WireError("delta: the blocks of the message have another length than it says")
    return _Blocks(1 << log, index)


def _words(x: Tensor, form: DeltaFormat) -> Words:
    return x.detach().contiguous().view(-1).view(torch.uint8).numpy().view(f"<u{form.nbytes}")


# --------------------------------------------------------------------------------------------------------- blocks


def _sorted_by_class(words_N: Words, form: DeltaFormat) -> tuple[Words, Words]:
    """The order by exponent, the largest first, and the exponent of each value in this order."""
    exponent_N = (words_N.astype(np.int64) >> form.shift) & form.mask
    order_N = np.argsort(-exponent_N, kind="stable")
    return order_N, exponent_N[order_N]


def _ordered(words: Words, form: DeltaFormat) -> Words:
    """Words as integers in the order of the numbers that they stand for; a bijection."""
    x, top = words.astype(np.int64), 1 << (8 * form.nbytes - 1)
    return np.where(x & top, 2 * top - 1 - x, x | top)


def _coded(old_N: Words, new_N: Words, form: DeltaFormat) -> bytes:
    order_N, class_N = _sorted_by_class(old_N, form)
    old_N, new_N = old_N[order_N], new_N[order_N]
    changed_N = old_N != new_N
    if not changed_N.any():
        return b""
    bits, half = _BitWriter(), 1 << (8 * form.nbytes - 1)
    step = (_ordered(new_N, form) - _ordered(old_N, form))[changed_N]
    step = (step + half) % (2 * half) - half
    class_M, size_M = class_N[changed_N], np.abs(step)
    # Classes before the first step of two or more have none in the second level.
    classes = _classes(class_N)
    small = next((i for i, c in enumerate(classes) if (size_M[class_M == c] > 1).any()), len(classes))
    later = classes[small:]
    in_later = np.isin(class_M, later)
    first, second = _Runs.of(changed_N, class_N, classes), _Runs.of(size_M[in_later] > 1, class_M[in_later], later)
    rest = size_M[size_M > 1] - 2
    rest_class = class_M[size_M > 1]
    parameter = {c: _parameter(rest[rest_class == c]) for c in later}
    first.write_parameters(bits)
    bits.put([small], [9])
    second.write_parameters(bits)
    bits.put(list(parameter.values()), [5] * len(later))
    first.write(bits)
    bits.put(step < 0, np.ones(len(step), np.int64))
    second.write(bits)
    bits.put_rice(rest, np.array([parameter[c] for c in rest_class], np.int64))
    return bits.bytes()


def _decoded(old_N: Words, body: bytes, form: DeltaFormat) -> Words | None:
    """The new words; None if there are none for this old tensor."""
    if len(body) in (0, old_N.nbytes):
        return np.frombuffer(body, old_N.dtype).copy() if body else old_N.copy()
    if len(body) > old_N.nbytes:
        return None
    order_N, class_N = _sorted_by_class(old_N, form)
    bits, classes = _BitReader(body), _classes(class_N)
    inverted = [(bits.take(1), bits.take(5)) for _ in classes]
    small = bits.take(9)
    if small > len(classes):
        return None
    later = classes[small:]
    inverted_later = [(bits.take(1), bits.take(5)) for _ in later]
    parameter = {c: bits.take(5) for c in later}
    changed_N = _read_runs(bits, class_N, dict(zip(classes, inverted, strict=True)))
    if changed_N is None:
        return None
    class_M = class_N[changed_N]
    negative = np.array([bits.take(1) for _ in class_M], bool)
    in_later = np.isin(class_M, later)
    big = _read_runs(bits, class_M[in_later], dict(zip(later, inverted_later, strict=True)))
    if big is None:
        return None
    size_M = np.ones(len(class_M), np.int64)
    places = np.flatnonzero(in_later)[big]
    size_M[places] = [bits.rice(parameter[c]) + 2 for c in class_M[places]]
    if not bits.at_end():
        return None
    top = 1 << (8 * form.nbytes - 1)
    x = (_ordered(old_N[order_N][changed_N], form) + np.where(negative, -size_M, size_M)) % (2 * top)
    new_N = old_N.copy()
    new_N[order_N[changed_N]] = np.where(x & top, x - top, 2 * top - 1 - x)
    return new_N


def _classes(class_N: Words) -> list[int]:
    return [int(c) for c in np.unique(class_N)[::-1]]


# ----------------------------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class _Runs:
    """Flags as lengths of the runs of zeros before each one, and after the last one unless it is the last flag.

    A class with more ones than zeros is inverted. A run belongs to the class that it begins in, and may end in another.
    """

    inverted: list[int]
    parameters: list[int]
    length_R: Words
    parameter_R: Words

    @classmethod
    def of(cls, flags_N: Words, class_N: Words, classes: Sequence[int]) -> _Runs:
        sizes = {c: (int((class_N == c).sum()), int(flags_N[class_N == c].sum())) for c in classes}
        inverted = {c: 2 * ones > numel for c, (numel, ones) in sizes.items()}
        ones = np.flatnonzero(flags_N ^ np.array([inverted[c] for c in class_N], bool))
        start, end = np.append(0, ones + 1), np.append(ones, len(flags_N))
        start, end = start[start < len(flags_N)], end[start < len(flags_N)]
        parameter = {c: _run_parameter(numel, min(ones, numel - ones)) for c, (numel, ones) in sizes.items()}
        parameter_R = np.array([parameter[c] for c in class_N[start]], np.int64)
        return cls([*map(int, inverted.values())], [*parameter.values()], end - start, parameter_R)

    def write_parameters(self, bits: _BitWriter) -> None:
        for inverted, parameter in zip(self.inverted, self.parameters, strict=True):
            bits.put([inverted, parameter], [1, 5])

    def write(self, bits: _BitWriter) -> None:
        bits.put_rice(self.length_R, self.parameter_R)


def _read_runs(bits: _BitReader, class_N: Words, parameters: dict[int, tuple[int, int]]) -> Words | None:
    flags_N = np.array([parameters[c][0] for c in class_N], bool)
    at = 0
    while at < len(class_N):
        at += bits.rice(parameters[class_N[at]][1])
        if at > len(class_N):
            return None
        flags_N[at : at + 1] ^= True
        at += 1
    return flags_N


def _run_parameter(numel: int, ones: int) -> int:
    """The Rice parameter for the runs of zeros between so many ones.

    With a share p of ones, k + 1 takes less than k while (1 - p)^(2^k) is above one over the golden ratio, whose
    logarithm is 64 / 133.
    """
    k = 0
    while 133 * max(ones, 1) << (k + 1) < 64 * (2 * numel - ones):
        k += 1
    return k


def _parameter(numbers: Words) -> int:
    """The Rice parameter of the least cost, as numbers of each bit length cost on average; the smallest of several."""
    lengths = np.bincount([int(n).bit_length() for n in numbers], minlength=33).tolist()

    def cost(k: int) -> int:
        total = 0
        for length, count in enumerate(lengths):
            twice = (3 << (length - 1 - k)) - 1 if length > k else 0
            total += count * (twice + 2 * (k + 1) if twice < 2 * _UNARY else 2 * (_UNARY + 32))
        return total

    return min(range(32), key=cost)


# ----------------------------------------------------------------------------------------------------------- bits


@dataclass
class _BitWriter:
    """A stream of bits, the lowest of each byte first."""

    values: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def put(self, values: Any, lengths: Any) -> None:
        self.values += [int(value) for value in values]
        self.lengths += [int(length) for length in lengths]

    def put_rice(self, numbers: Words, parameters: Words) -> None:
        for n, k in zip(numbers.tolist(), parameters.tolist(), strict=True):
            q = n >> k
            code = ((1 << q) - 1) | (n & ((1 << k) - 1)) << (q + 1) if q < _UNARY else ((1 << _UNARY) - 1) | n << _UNARY
            self.put([code], [q + 1 + k if q < _UNARY else _UNARY + 32])

    def bytes(self) -> bytes:
        values, lengths = np.array(self.values, np.uint64), np.array(self.lengths)
        starts = np.cumsum(lengths) - lengths
        offset = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        bits = (np.repeat(values, lengths) >> offset.astype(np.uint64)) & np.uint64(1)
        return np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()


class _BitReader:
    """Zeros follow the end."""

    def __init__(self, body: bytes) -> None:
        self._bits = np.unpackbits(np.frombuffer(body, np.uint8), bitorder="little").tolist()
        self._next = self._stream()
        self._taken = 0

    def _stream(self) -> Iterator[int]:
        yield from self._bits
        while True:
            yield 0

    def take(self, length: int) -> int:
        self._taken += length
        return sum(next(self._next) << i for i in range(length))

    def rice(self, k: int) -> int:
        q = 0
        while q < _UNARY and self.take(1):
            q += 1
        return self.take(32) if q == _UNARY else q << k | self.take(k)

    def at_end(self) -> bool:
        left = len(self._bits) - self._taken
        return 0 <= left < 8 and not any(self._bits[self._taken :])
