"""The timed calls of a codec: each direction, on buffers that are allocated beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire_bench.codecs.data import normal
from thinwire_bench.codecs.soundness import SEED
from thinwire_bench.codecs.speeds import TimedCall

DIRECTIONS = ("encode", "decode", "decode_add")
FUSED = ("encode_slices", "decode_sum", "decode_sum_encode")
FUSED_CODECS = ("int8:256", "int4:256")
INPUTS = 4
"""Slices of a tensor in ``encode_slices``; messages that are added up in the two others."""

_TILE = 1 << 22


@dataclass(frozen=True)
class Buffers:
    """Buffers that all timed calls share: N(0,1), repeated every 4 million values, to encode; an output like it; an
    accumulator in fp32. Every byte has been written once."""

    x: Tensor
    out: Tensor
    total: Tensor

    @classmethod
    def make(cls, size: int, dtype: torch.dtype, device: torch.device) -> Buffers:
        """Buffers for a tensor of so many bytes."""
        numel = size // dtype.itemsize
        tile = normal(min(numel, _TILE)).to(dtype)
        x = torch.empty(numel, dtype=dtype, device=device)
        for start in range(0, numel, tile.numel()):
            part = x[start : start + tile.numel()]
            part.copy_(tile[: part.numel()])
        return cls(x, torch.zeros_like(x), torch.zeros(numel, dtype=torch.float32, device=device))


def codec_jobs(codec: Codec, buffers: Buffers, *, fused: bool) -> tuple[list[TimedCall], float]:
    """The directions of a codec, the fused ones too if ``fused``, and the bits of a message for each value."""
    x, out, total = buffers.x, buffers.out, buffers.total
    numel, dtype, size = x.numel(), x.dtype, x.numel() * x.element_size()
    seed = SEED if codec.spec.needs_seed else None
    room = torch.zeros(codec.max_wire_bytes(numel, dtype), dtype=torch.uint8, device=x.device)
    wire = codec.encode(x, seed=seed, out=room)
    calls = {
        "encode": lambda: codec.encode(x, seed=seed, out=room),
        "decode": lambda: codec.decode(wire, numel, dtype, out=out),
        "decode_add": lambda: codec.decode_add(wire, total, encoded=dtype),
    }
    if fused:
        part = numel // INPUTS
        bounds = [(index * part, (index + 1) * part) for index in range(INPUTS - 1)] + [((INPUTS - 1) * part, numel)]
        longest = codec.slot_bytes(numel - (INPUTS - 1) * part, dtype)
        slots = torch.zeros(INPUTS * longest, dtype=torch.uint8, device=x.device)
        wires = codec.encode_slices(x, [(0, numel)] * INPUTS, seed=seed)
        result = torch.zeros(codec.max_wire_bytes(numel, torch.float32), dtype=torch.uint8, device=x.device)
        calls |= {
            "encode_slices": lambda: codec.encode_slices(x, bounds, seed=seed, out=slots),
            "decode_sum": lambda: codec.decode_sum(wires, numel, dtype, out=out, encoded=dtype),
            "decode_sum_encode": lambda: codec.decode_sum_encode(
                wires, numel, codec, scale=1 / INPUTS, seed=seed, out=result, encoded=dtype
            ),
        }
    read = {"decode_sum": INPUTS, "decode_sum_encode": INPUTS}
    jobs = [TimedCall(str(codec.spec), way, read.get(way, 1) * size, call) for way, call in calls.items()]
    return jobs, 8 * wire.numel() / numel
