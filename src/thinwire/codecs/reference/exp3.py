"""exp3: lossless bf16. Exponents are stored in three bits below the base of their block, with escapes."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from thinwire.codecs.bits import as_bytes, pack, read_header, store, unpack, whole_words
from thinwire.codecs.codec import Codec
from thinwire.errors import WireError

CODED, RAW = 0x33505845, 0x30505845
BLOCK = 512
ESCAPE = 7
BASES = 4
"""Number of bases that are tried below the largest exponent of a block."""


@final
class ReferenceExp3(Codec):
    """Lossless for bf16; variable length."""

    backend: ClassVar[str] = "reference"

    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        del seed
        parts = _coded(x.view(torch.int16).to(torch.int32) & 0xFFFF)
        magic = CODED
        if sum(part.numel() for part in parts) >= _words(2 * x.numel()):
            magic, parts = RAW, [whole_words(as_bytes(x))]
        size = 8 + sum(part.numel() for part in parts)
        header = torch.tensor([magic, size // 4], device=x.device).to(torch.int32)
        wire[:size] = torch.cat((as_bytes(header), *parts))
        return size

    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        magic, size = read_header(wire, "exp3", (CODED, RAW))
        body, numel = wire[8:size], out.numel()
        if magic == RAW:
            if body.numel() != _words(2 * numel):
                raise WireError(f"exp3: {numel} values are {2 * numel} bytes, the message holds {body.numel()}")
            store(body[: 2 * numel].clone().view(encoded), out, add=add)
            return
        store(_decoded(body, numel).view(torch.bfloat16), out, add=add)


make = ReferenceExp3
"""Make the codec of a spec."""


def _coded(bits: Tensor) -> list[Tensor]:
    """The parts of a message after its header, from values as 16-bit patterns (N)."""
    numel, device = bits.numel(), bits.device
    exponent = (bits >> 7) & 0xFF
    rest = ((bits >> 8) & 0x80) | (bits & 0x7F)
    inside_BV = _blocks(torch.ones_like(exponent, dtype=torch.bool))
    exponent_BV = _blocks(exponent)
    largest_B = exponent_BV.amax(1)
    bases_BK = (largest_B[:, None] - torch.arange(BASES, device=device)).clamp(min=0)
    offsets_BKV = bases_BK[:, :, None] - exponent_BV[:, None, :]
    escapes_BK = (((offsets_BKV < 0) | (offsets_BKV >= ESCAPE)) & inside_BV[:, None, :]).sum(2)
    chosen_B1 = escapes_BK.argmin(1, keepdim=True)
    # argmin may return any of several equal minima, but the format requires the first.
    smallest_B1 = escapes_BK.gather(1, chosen_B1)
    chosen_B1 = (escapes_BK == smallest_B1).int().argmax(1, keepdim=True)
    base_B1 = bases_BK.gather(1, chosen_B1)
    offset_BV = base_B1 - exponent_BV
    code_BV = torch.where((offset_BV < 0) | (offset_BV >= ESCAPE), ESCAPE, offset_BV)
    code_BV = torch.where(inside_BV, code_BV, 0)
    planes = torch.stack([(code_BV >> k) & 1 for k in range(3)], 1)
    escaped = code_BV.view(-1)[:numel] == ESCAPE
    return [
        whole_words(base_B1.view(-1).to(torch.uint8)),
        whole_words(as_bytes(smallest_B1.view(-1).to(torch.int16))),
        pack(planes.view(-1), 1),
        whole_words(rest.to(torch.uint8)),
        whole_words(exponent[escaped].to(torch.uint8)),
    ]


def _decoded(body: Tensor, numel: int) -> Tensor:
    """Decode to 16-bit patterns (N), int16."""
    num_blocks = -(-numel // BLOCK)
    sizes = (_words(num_blocks), _words(2 * num_blocks), 192 * num_blocks, _words(numel))
    if body.numel() < sum(sizes):
        raise WireError(f"exp3: {numel} values need {sum(sizes)} bytes and escapes, {body.numel()} are there")
    bases, counts, planes, rest, escapes = body.split((*sizes, body.numel() - sum(sizes)))
    counts_B = counts[: 2 * num_blocks].clone().view(torch.int16).to(torch.int32) & 0xFFFF
    bits = unpack(planes, 1).to(torch.int32).view(num_blocks, 3, BLOCK)
    code_BV = bits[:, 0] | (bits[:, 1] << 1) | (bits[:, 2] << 2)
    escaped_BV = _blocks(torch.ones(numel, dtype=torch.bool, device=body.device)) & (code_BV == ESCAPE)
    total = int(escaped_BV.sum())
    if not torch.equal(escaped_BV.sum(1), counts_B.long()) or escapes.numel() != _words(total):
        raise WireError(f"exp3: {total} escapes are marked, {int(counts_B.sum())} announced, {escapes.numel()} there")
    exponent_BV = (bases[:num_blocks].to(torch.int32)[:, None] - code_BV) & 0xFF
    exponent_BV[escaped_BV] = escapes[:total].to(torch.int32)
    rest = rest[:numel].to(torch.int32)
    patterns: Tensor = ((rest & 0x80) << 8) | (exponent_BV.view(-1)[:numel] << 7) | (rest & 0x7F)
    return patterns.to(torch.int16)


def _blocks(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)


def _words(nbytes: int) -> int:
    return -(-nbytes // 4) * 4
