"""Block quantisation: ``intN:BLOCK`` and ``intN:tensor``. Section numbers are those of ``docs/wire-format.md``.

Shapes: B blocks, V values per block, N values per message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from thinwire.codecs.bits import as_bytes, pack, store, unpack
from thinwire.codecs.codec import Codec

SMALLEST_MAX = 2.0**-112
"""Blocks with a smaller maximum are quantised as if this were their maximum, so that no reciprocal overflows."""


@final
class BlockCodec(Codec):
    """N bits per value and one scale per block."""

    backend: ClassVar[str] = "reference"

    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        codes, scales = self._quantize(x.float(), seed)
        packed = pack(codes, self._bits)
        total = self.max_wire_bytes(x.numel(), x.dtype)
        scales_at = -(-packed.numel() // 16) * 16
        wire[:total] = 0
        wire[: packed.numel()] = packed
        wire[scales_at : scales_at + 4 * scales.numel()] = as_bytes(scales)
        return total

    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        del encoded
        numel, block = out.numel(), self._block(out.numel())
        num_blocks = -(-numel // block)
        code_bytes = -(-numel * self._bits // 8)
        scales_at = -(-code_bytes // 16) * 16
        scales = wire[scales_at : scales_at + 4 * num_blocks].clone().view(torch.float32)
        half = 1 << (self._bits - 1)
        codes = (unpack(wire[:code_bytes], self._bits)[:numel] ^ half) - half  # of two's complement
        codes_BV = _blocks(codes.float(), block)
        if "hadamard" in self.spec.options:
            full = numel // block
            codes_BV[:full] = butterflies(codes_BV[:full]) * signs(block, wire.device)
        store((codes_BV * scales[:, None]).view(-1)[:numel], out, add=add)

    @property
    def _bits(self) -> int:
        assert self.spec.bits is not None
        return self.spec.bits

    def _block(self, numel: int) -> int:
        return self.spec.block or numel

    def _quantize(self, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Codes (N), int32, and scales (B), fp32, of fp32 values (N)."""
        block = self._block(x.numel())
        x_BV = _blocks(x, block)
        poisoned_B = ~x_BV.isfinite().all(1)
        x_BV = torch.where(poisoned_B[:, None], 0.0, x_BV)
        if "hadamard" in self.spec.options:
            full = x.numel() // block
            x_BV[:full] = butterflies(x_BV[:full] * (1.0 / block) * signs(block, x.device))
        largest_B = x_BV.abs().amax(1)
        if "stochastic" in self.spec.options:
            codes_BV, scales_B = self._round_at_random(x_BV, largest_B, seed)
        else:
            positive_B = (x_BV == largest_B[:, None]).any(1)
            max_B = largest_B.clamp(min=SMALLEST_MAX) * torch.where(positive_B, 1.0, -1.0)
            quantize = self._search if self.spec.searches_clip else self._round
            codes_BV, scales_B = quantize(x_BV, max_B)
        zero_B = largest_B == 0
        codes_BV = torch.where((poisoned_B | zero_B)[:, None], 0, codes_BV)
        scales_B = torch.where(zero_B, 0.0, scales_B)
        scales_B = torch.where(poisoned_B, torch.nan, scales_B)
        return codes_BV.view(-1)[: x.numel()], scales_B

    def _round(self, x_BV: Tensor, max_B: Tensor) -> tuple[Tensor, Tensor]:
        """Rule 3."""
        levels = 1 << (self._bits - 1)
        # Divide tensor by tensor: torch replaces a number divided by a tensor by a multiplication with the reciprocal.
        factor_B = torch.full_like(max_B, -levels) / max_B
        codes_BV = torch.round(x_BV * factor_B[:, None]).clamp(-levels, levels - 1).to(torch.int32)
        return codes_BV, max_B * (-1.0 / levels)

    def _search(self, x_BV: Tensor, max_B: Tensor) -> tuple[Tensor, Tensor]:
        """Rule 4."""
        search, bits = SEARCHES[self._bits], self._bits
        factor_B = torch.full_like(max_B, -search.coarse * search.finer) / max_B
        fine_BV = torch.round(x_BV * factor_B[:, None]).to(torch.int32)
        magnitude_BV = torch.div(fine_BV.abs() + search.finer // 2, search.finer, rounding_mode="floor")
        coarse_BV = fine_BV.sign() * magnitude_BV
        sum_B = magnitude_BV.sum(1, dtype=torch.int32)
        squares_B = (coarse_BV * coarse_BV).sum(1, dtype=torch.int32)
        ratio_B = sum_B.float() / (squares_B + search.outlier).float()
        centre_B = (
            torch.round(ratio_B * search.slope + search.base).clamp(max=MOST_GAIN - search.spread).to(torch.int32)
        )
        # A code of the coarse values is c * gain / unit, rounded.
        unit = 64 * (search.coarse + 1) >> (bits - 1)
        num_B, den_B = _products(coarse_BV, _codes_of(coarse_BV, centre_B, unit, bits))
        for offset in (-search.spread, search.spread):
            tried_num_B, tried_den_B = _products(coarse_BV, _codes_of(coarse_BV, centre_B + offset, unit, bits))
            better_B = (tried_num_B * tried_num_B) * den_B > (num_B * num_B) * tried_den_B
            num_B = torch.where(better_B, tried_num_B, num_B)
            den_B = torch.where(better_B, tried_den_B, den_B)
        gain_B = torch.round(den_B * (32768 // search.finer) / num_B.clamp(min=1)).to(torch.int32)
        codes_BV = _codes_of(fine_BV, gain_B, 32768, bits)
        num_B, den_B = _products(coarse_BV, codes_BV)
        scales_B = max_B * (-1.0 / search.coarse) * (num_B / den_B.clamp(min=1))
        return codes_BV, torch.where(den_B == 0, 0.0, scales_B)

    def _round_at_random(self, x_BV: Tensor, largest_B: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Rule 5."""
        levels = (1 << (self._bits - 1)) - 1
        largest_B = largest_B.clamp(min=SMALLEST_MAX)
        levels_B = torch.full_like(largest_B, levels)
        position = torch.arange(x_BV.numel(), device=x_BV.device).view_as(x_BV)
        codes_BV = torch.floor(x_BV * (levels_B / largest_B)[:, None] + uniform(position, seed))
        return codes_BV.clamp(-levels, levels).to(torch.int32), largest_B / levels_B


make = BlockCodec
"""Make the codec of a spec."""


class GainSearch(NamedTuple):
    """The constants of rule 4 for one number of bits.

    Attributes:
        coarse: Largest of the coarse values.
        finer: Fine values of a coarse one, a power of two.
        outlier: What is added to the sum of the coarse values' squares.
        base: Gain of the middle of the search for a block of one large value.
        slope: How it grows with the sum of magnitudes over the sum of squares.
        spread: Distance of the two other gains.
    """

    coarse: int
    finer: int
    outlier: int
    base: float
    slope: float
    spread: int


SEARCHES: Mapping[int, GainSearch] = {
    2: GainSearch(63, 2, 8192, 34.0, 1575.0, 12),
    3: GainSearch(63, 4, 8192, 38.0, 1282.0, 8),
    4: GainSearch(63, 8, 8192, 47.25, 783.0, 5),
    5: GainSearch(127, 8, 49152, 56.5, 764.0, 4),
}
"""By the number of bits. The constants minimize the error on the data sets of ``thinwire bench codecs`` and others."""

MOST_GAIN = 255
"""No gain that is tried is larger."""


def uniform(position: Tensor, seed: int) -> Tensor:
    """fp32 in [0, 1) from positions (int64) and a 32-bit seed (rule 5)."""
    mask = 0xFFFFFFFF
    h = (position * 0x9E3779B1 + seed) & mask
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) & mask
    h = ((h ^ (h >> 15)) * 0x735A2D97) & mask
    h = h ^ (h >> 15)
    return (h >> 8).float() * 2.0**-24


def signs(block: int, device: torch.device) -> Tensor:
    """+1 or -1 for each position of a rotated block (rule 6)."""
    position = torch.arange(block, device=device)
    return 1.0 - 2.0 * (((position * 0x9E3779B1 + 0x7F4A7C15) >> 31) & 1).float()


def butterflies(x_BV: Tensor) -> Tensor:
    """Unnormalised Walsh-Hadamard transform of every row; V is a power of two."""
    num_blocks, block = x_BV.shape
    distance = 1
    while distance < block:
        pairs = x_BV.reshape(num_blocks, block // (2 * distance), 2, distance)
        upper, lower = pairs[:, :, 0], pairs[:, :, 1]
        x_BV = torch.stack((upper + lower, upper - lower), 2).view(num_blocks, block)
        distance *= 2
    return x_BV


def _blocks(x: Tensor, block: int) -> Tensor:
    """Reshape values (N) to (B, V), completed with zeros, which change neither a maximum nor an error nor a sum."""
    return torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)


def _codes_of(x_BV: Tensor, gain_B: Tensor, unit: int, bits: int) -> Tensor:
    """x * gain / unit rounded to nearest, halves upwards, and limited to codes."""
    levels = 1 << (bits - 1)
    quotient_BV = torch.div(x_BV * gain_B[:, None] + unit // 2, unit, rounding_mode="floor")
    return quotient_BV.clamp(-levels, levels - 1)


def _products(x_BV: Tensor, codes_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of x * code and of code * code as fp32; the least-squares scale is the first over the second."""
    num_B = (x_BV * codes_BV).sum(1, dtype=torch.int32)
    den_B = (codes_BV * codes_BV).sum(1, dtype=torch.int32)
    return num_B.float(), den_B.float()
