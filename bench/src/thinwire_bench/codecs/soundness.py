"""Checks before a codec's figures count: its bytes equal the reference's, and a lossless codec loses nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec, get
from thinwire.spec.codec import encodable_dtypes
from thinwire_bench.codecs.data import student

SEED = 1
"""Seed of codecs with stochastic rounding."""

_SAMPLE = 20_011
"""Values: not a multiple of any block."""
_WINDOW = 1 << 14
"""A multiple of every block, so that a window of a tensor is encoded as it would be alone."""
_INPUTS = 3
_BITS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True)
class CodecGate:
    """Whether a codec does on some tensor what the reference does.

    Attributes:
        codec: Name of the codec.
        dtype: Dtype of the tensor.
        size: Size of the tensor in bytes; None for the sample on which everything is compared with the reference.
        problem: What differs, or None.
        target: Instruction set that was forced; None where the best one was used.
    """

    codec: str
    dtype: str
    size: int | None
    problem: str | None
    target: str | None = None


def check_sample(codec: Codec, dtype: torch.dtype, device: torch.device) -> str | None:
    """The difference in words between a codec and the reference on a sample with heavy tails, zeros, denormals and a
    NaN; None if there is none."""
    x = _sample(dtype)
    reference = get(codec.spec, backend="reference")
    for what, ours, theirs in _comparisons(codec, reference, x.to(device), x):
        if not _equal(ours.cpu(), theirs):
            return f"{what} differs from the reference backend"
    finite = x[x.isfinite()].to(device)
    wire = codec.encode(finite, seed=SEED)
    if codec.spec.is_lossless and not same_bits(codec.decode(wire, finite.numel(), dtype), finite):
        return "it is not lossless"
    return None


def check_timed(codec: Codec, x: Tensor, decoded: Tensor) -> str | None:
    """What is wrong with a tensor that was encoded and decoded for timing, as far as its two ends tell; None if nothing
    is."""
    if codec.spec.is_lossless:
        return None if same_bits(x, decoded) else "it is not lossless"
    largest = float(x.abs().max())
    for where, start in (("first", 0), ("last", max(0, (x.numel() - 1) // _WINDOW * _WINDOW))):
        window = x[start : start + _WINDOW].cpu()
        result = decoded[start : start + _WINDOW].cpu()
        if codec.spec.per_tensor or codec.spec.needs_seed:
            # The scale is all values' and the dice depend on the position: a step is the most that may be lost.
            assert codec.spec.bits is not None
            step = largest / ((1 << (codec.spec.bits - 1)) - 1)
            if bool((window.float() - result.float()).abs().max() <= step + largest * 2**-8):
                continue
        else:
            reference = get(codec.spec, backend="reference")
            wire = reference.encode(window)
            if same_bits(reference.decode(wire, window.numel(), x.dtype), result):
                continue
        return f"the {where} values of a tensor of {x.numel()} decode to something else"
    return None


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits; zeros of two signs differ."""
    view = _BITS[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(view), b.view(view))


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two results are equal. A NaN is a NaN: what else it holds is the processor's choice."""
    if a.dtype == torch.uint8:
        return same_bits(a, b)
    return torch.equal(a.isnan(), b.isnan()) and same_bits(a.nan_to_num(0.0), b.nan_to_num(0.0))


def _sample(dtype: torch.dtype) -> Tensor:
    x = student(_SAMPLE)
    x[1000:3000] = 0.0
    x[3000:4000] *= 1e-39
    x[4000:5000] *= 1e30
    x[5000:6000] *= 1e-3
    x[6500] = torch.nan
    return x.to(dtype)


def _comparisons(codec: Codec, reference: Codec, x: Tensor, x_cpu: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Pairs that should be equal; the reference's side is computed on CPU."""
    numel, dtype = x.numel(), x.dtype
    wire, wire_cpu = codec.encode(x, seed=SEED), reference.encode(x_cpu, seed=SEED)
    yield "a message", wire, wire_cpu
    yield "decode", codec.decode(wire, numel, dtype), reference.decode(wire_cpu, numel, dtype)
    total, total_cpu = x.float().nan_to_num(), x_cpu.float().nan_to_num()
    codec.decode_add(wire, total, encoded=dtype)
    yield "decode_add", total, reference.decode_add(wire_cpu, total_cpu, encoded=dtype)
    step = numel // (_INPUTS + 1)
    length = step + step // 2
    bounds = [(index * step, index * step + length) for index in range(_INPUTS)]
    wires, wires_cpu = codec.encode_slices(x, bounds, seed=SEED), reference.encode_slices(x_cpu, bounds, seed=SEED)
    for row, row_cpu, (start, stop) in zip(wires, wires_cpu, bounds, strict=True):
        used = reference.encode(x_cpu[start:stop], seed=SEED).numel()
        yield "encode_slices", row[:used], row_cpu[:used]
    mean: dict[str, Any] = {"scale": 1 / _INPUTS, "encoded": dtype}
    yield "decode_sum", codec.decode_sum(wires, length, **mean), reference.decode_sum(wires_cpu, length, **mean)
    if "float32" in encodable_dtypes(codec.spec):  # sums are fp32
        ours = codec.decode_sum_encode(wires, length, codec, seed=SEED, **mean)
        yield "decode_sum_encode", ours, reference.decode_sum_encode(wires_cpu, length, reference, seed=SEED, **mean)
