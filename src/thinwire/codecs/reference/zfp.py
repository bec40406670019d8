"""ZFP at a fixed rate, one dimension, fp32: the stream of libzfp (Lindstrom, TVCG 2014).

Shapes: B blocks of four values. Block arithmetic is int64 reduced to 32 bits where libzfp's is unsigned.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from thinwire.codecs.bits import pack, store, unpack
from thinwire.codecs.codec import Codec

NEGABINARY = 0xAAAAAAAA
HEADER = 9
BIAS = 127
MOST_CODE_BITS = 8
"""Largest number of bits in the code of one plane."""


@final
class ReferenceZfp(Codec):
    """Fixed length, lossy. NaN and Inf turn their whole block into NaN, by a header that libzfp never writes."""

    backend: ClassVar[str] = "reference"

    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        del seed
        total = self.max_wire_bytes(x.numel(), x.dtype)
        stream = pack(_encode_blocks(_blocks(x.float()), self.spec.zfp_block_bits).reshape(-1), 1)
        wire[:total] = 0
        wire[: stream.numel()] = stream
        return total

    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        del encoded
        block_bits, num_blocks = self.spec.zfp_block_bits, -(-out.numel() // 4)
        bits = unpack(wire, 1)[: num_blocks * block_bits].view(num_blocks, block_bits)
        store(_decode_blocks(bits).view(-1)[: out.numel()], out, add=add)


make = ReferenceZfp
"""Make the codec of a spec."""


def _blocks(x: Tensor) -> Tensor:
    """Reshape to (B, 4). A partial last block is completed by libzfp's rule: repeat the last value, then the first."""
    partial = x.numel() % 4
    if partial:
        tail = x[-partial:]
        padding = {1: (0, 0, 0), 2: (1, 0), 3: (0,)}[partial]
        x = torch.cat((x, tail[list(padding)]))
    return x.view(-1, 4)


def _encode_blocks(x_B4: Tensor, block_bits: int) -> Tensor:
    """Encode blocks to bits (B, block_bits), uint8."""
    poisoned_B = ~x_B4.isfinite().all(1)
    x_B4 = torch.where(poisoned_B[:, None], 0.0, x_B4)
    largest_B = x_B4.abs().amax(1)
    exponent_B = torch.frexp(largest_B).exponent.clamp(min=1 - BIAS)
    integers_B4 = _quantize(x_B4, exponent_B)
    header_B = torch.where(largest_B > 0, 2 * (exponent_B.long() + BIAS) + 1, 0)
    header_B = torch.where(poisoned_B, 1, header_B)
    planes_B4 = ((_lift(integers_B4) + NEGABINARY) & 0xFFFFFFFF) ^ NEGABINARY
    planes_B4 = torch.where((largest_B > 0)[:, None], planes_B4, 0)
    return _write(header_B, planes_B4, block_bits, coded_B=largest_B > 0)


def _quantize(x_B4: Tensor, exponent_B: Tensor) -> Tensor:
    scaled = torch.trunc(torch.ldexp(x_B4.double(), 30 - exponent_B[:, None]))
    # Here libzfp's scale 2^(30 - e) overflows fp32, and x86 casts infinities and NaN to the smallest integer.
    overflow_B1 = (30 - exponent_B > 127)[:, None]
    return torch.where(overflow_B1, -(2.0**31), scaled).long()


def _signed(x: Tensor) -> Tensor:
    return ((x + 2**31) & 0xFFFFFFFF) - 2**31


def _lift(integers_B4: Tensor) -> Tensor:
    x, y, z, w = integers_B4.unbind(1)
    x = _signed(x + w) >> 1
    w = _signed(w - x)
    z = _signed(z + y) >> 1
    y = _signed(y - z)
    x = _signed(x + z) >> 1
    z = _signed(z - x)
    w = _signed(w + y) >> 1
    y = _signed(y - w)
    w = _signed(w + (y >> 1))
    y = _signed(y - (w >> 1))
    return torch.stack((x, y, z, w), 1)


def _unlift(integers_B4: Tensor) -> Tensor:
    x, y, z, w = integers_B4.unbind(1)
    y = _signed(y + (w >> 1))
    w = _signed(w - (y >> 1))
    y = _signed(y + w)
    w = _signed(_signed(w << 1) - y)
    z = _signed(z + x)
    x = _signed(_signed(x << 1) - z)
    y = _signed(y + z)
    z = _signed(_signed(z << 1) - y)
    w = _signed(w + x)
    x = _signed(_signed(x << 1) - w)
    return torch.stack((x, y, z, w), 1)


def plane_code(significant: int, plane: int) -> tuple[int, int, int]:
    """Code one bit plane of a block: returns the bits (the first one lowest), their number, and the number of values
    that are significant afterwards. The first ``significant`` bits are written unchanged. Then, as long as the rest
    contains a one, the distance to it follows in unary."""
    bits = [plane >> index & 1 for index in range(significant)]
    at = significant
    while at < 4:
        rest = plane >> at
        bits.append(int(rest != 0))
        if not rest:
            break
        while at < 3:
            bits.append(plane >> at & 1)
            if bits[-1]:
                break
            at += 1
        at += 1
    return sum(bit << index for index, bit in enumerate(bits)), len(bits), at


_PLANE_CODES = [[plane_code(significant, plane) for plane in range(16)] for significant in range(5)]


def _write(header_B: Tensor, planes_B4: Tensor, block_bits: int, *, coded_B: Tensor) -> Tensor:
    num_blocks, device = len(header_B), header_B.device
    table = torch.tensor(_PLANE_CODES, device=device)
    # An additional column takes all bits that no longer fit; a truncated code is a prefix.
    bits = torch.zeros(num_blocks, block_bits + 1, dtype=torch.uint8, device=device)
    bits[:, :HEADER] = (header_B[:, None] >> torch.arange(HEADER, device=device)) & 1
    rows = torch.arange(num_blocks, device=device)[:, None]
    place = torch.arange(MOST_CODE_BITS, device=device)
    at_B = torch.full_like(header_B, HEADER)
    significant_B = torch.zeros_like(header_B)
    for plane in range(31, -1, -1):
        plane_B = (((planes_B4 >> plane) & 1) << torch.arange(4, device=device)).sum(1)
        code_B, length_B, significant_B = table[significant_B, plane_B].unbind(1)
        used = (place < length_B[:, None]) & coded_B[:, None]
        column = torch.where(used, at_B[:, None] + place, block_bits).clamp(max=block_bits)
        bits[rows, column] = ((code_B[:, None] >> place) & 1).to(torch.uint8)
        at_B = at_B + length_B
    return bits[:, :block_bits]


def _decode_blocks(bits: Tensor) -> Tensor:
    """Decode blocks to fp32 (B, 4)."""
    device = bits.device
    header_B = (bits[:, :HEADER].long() << torch.arange(HEADER, device=device)).sum(1)
    nonzero_B, biased_B = (header_B & 1).bool(), header_B >> 1
    integers_B4 = _unlift(_signed((_read(bits) ^ NEGABINARY) - NEGABINARY))
    # libzfp multiplies in fp32 by a power of two, which may underflow to zero; fp64 holds the product exactly.
    power_B = torch.ldexp(torch.ones_like(biased_B, dtype=torch.float64), biased_B - BIAS - 30).float()
    scaled = (integers_B4.float().double() * power_B.double()[:, None]).float()
    values_B4 = torch.where(nonzero_B[:, None], scaled, 0.0)
    return torch.where((nonzero_B & (biased_B == 0))[:, None], torch.nan, values_B4)


def _read(bits: Tensor) -> Tensor:
    """Decode negabinary integers (B, 4): libzfp's decoder step by step, for all blocks at once."""
    num_blocks, block_bits = bits.shape
    at = torch.full((num_blocks,), HEADER, device=bits.device)
    padded = torch.nn.functional.pad(bits, (0, 1)).long()
    significant = torch.zeros_like(at)
    planes_B4 = torch.zeros(num_blocks, 4, dtype=torch.int64, device=bits.device)

    def read(wanted: Tensor) -> tuple[Tensor, Tensor]:
        """For each block that wants a bit, whether one is left, and the bit."""
        nonlocal at
        there = wanted & (at < block_bits)
        bit = padded.gather(1, at.clamp(max=block_bits)[:, None])[:, 0]
        at = at + there
        return there, (bit == 1) & there

    for plane in range(31, -1, -1):
        going = at < block_bits
        value = torch.zeros_like(at)
        raw = significant.clone()
        for index in range(4):
            _, bit = read(going & (index < raw))
            value |= bit.long() << index
        for _ in range(4):
            _, going = read(going & (significant < 4))
            inner = going.clone()
            for _ in range(3):
                there, bit = read(inner & (significant < 3))
                inner = there & ~bit
                significant = significant + inner
            value = torch.where(going, value | (1 << significant), value)
            significant = significant + going
        planes_B4 |= ((value[:, None] >> torch.arange(4, device=bits.device)) & 1) << plane
    return planes_B4
