"""MPC: massively parallel compression of 32-bit words (Yang, Mukka, Hesaaraki and Burtscher, CLUSTER 2015).

The stride is what the paper calls dimension: the number of words in a record, whose places resemble those of the record
before.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from thinwire.codecs.bits import as_bytes, pack, read_header, store, unpack, whole_words, words_of
from thinwire.codecs.codec import Codec
from thinwire.errors import WireError
from thinwire.spec import CodecSpec

CHUNK = 1024


def magic_of(spec: CodecSpec) -> int:
    """What messages begin with: the stride is in the highest byte."""
    return 0x3043504D + (spec.stride << 24)


@final
class ReferenceMpc(Codec):
    """Lossless for any words; variable length."""

    backend: ClassVar[str] = "reference"

    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        del seed
        data = as_bytes(x)
        words = words_of(whole_words(data))
        residual = _residual(words, self.spec.stride)
        kept = residual != 0
        bitmap = words_of(whole_words(pack(kept, 1)))
        size = 2 + bitmap.numel() + int(kept.sum())
        header = torch.tensor([magic_of(self.spec), size], device=x.device).to(torch.int32)
        wire[: 4 * size] = as_bytes(torch.cat((header, bitmap, residual[kept])))
        return 4 * size

    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        num_words = -(-out.numel() * encoded.itemsize // 4)
        bitmap_words = -(-num_words // 32)
        _, size = read_header(wire, "mpc", (magic_of(self.spec),))
        body = words_of(wire[8:size])
        if body.numel() < bitmap_words:
            raise WireError(f"mpc: {num_words} words need a bitmap of {bitmap_words}, {body.numel()} are there")
        bits = unpack(as_bytes(body[:bitmap_words]), 1).bool()
        count = int(bits.sum())
        if count != body.numel() - bitmap_words or bool(bits[num_words:].any()):
            raise WireError(
                f"mpc: the bitmap announces {count} words of {num_words}, {body.numel() - bitmap_words} are there"
            )
        residual = torch.zeros(num_words, dtype=torch.int32, device=wire.device)
        residual[bits[:num_words]] = body[bitmap_words:]
        values = as_bytes(_words(residual, self.spec.stride))[: out.numel() * encoded.itemsize].view(encoded)
        store(values, out, add=add)


make = ReferenceMpc
"""Make the codec of a spec."""


def _residual(words: Tensor, stride: int) -> Tensor:
    chunks = torch.nn.functional.pad(words, (0, -words.numel() % CHUNK)).view(-1, CHUNK)
    chunks = torch.cat((chunks[:, :stride], chunks[:, stride:] - chunks[:, :-stride]), 1)  # LNV
    flat = chunks.view(-1)[: words.numel()]
    grouped = words.numel() // 32 * 32
    planes = _transpose(flat[:grouped].view(-1, 32))  # BIT
    planes = torch.cat((planes[:, :1], planes[:, 1:] - planes[:, :-1]), 1)  # LNV1
    return torch.cat((planes.view(-1), flat[grouped:]))


def _words(residual: Tensor, stride: int) -> Tensor:
    grouped = residual.numel() // 32 * 32
    planes = residual[:grouped].view(-1, 32).cumsum(1, dtype=torch.int32)
    flat = torch.cat((_transpose_back(planes).view(-1), residual[grouped:]))
    chunks = torch.nn.functional.pad(flat, (0, -flat.numel() % CHUNK)).view(-1, CHUNK)
    records = torch.nn.functional.pad(chunks, (0, -CHUNK % stride)).view(len(chunks), -1, stride)
    chunks = records.cumsum(1, dtype=torch.int32).view(len(chunks), -1)[:, :CHUNK]
    return chunks.reshape(-1)[: residual.numel()]


def _transpose(words: Tensor) -> Tensor:
    """Transpose the bits of each row (G, 32): bit j of word p of the result is bit 31 - p of word j."""
    place = torch.arange(32, device=words.device)
    planes = [(((words.long() >> (31 - p)) & 1) << place).sum(1) for p in range(32)]
    return torch.stack(planes, 1).to(torch.int32) if words.numel() else words


def _transpose_back(planes: Tensor) -> Tensor:
    weight = 31 - torch.arange(32, device=planes.device)
    words = [(((planes.long() >> j) & 1) << weight).sum(1) for j in range(32)]
    return torch.stack(words, 1).to(torch.int32) if planes.numel() else planes
