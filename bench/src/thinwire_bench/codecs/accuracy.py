"""The error of codecs and peers on data sets, and what blocks are worth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.checkpoint.manifest import dtype_name
from thinwire.codecs import Codec
from thinwire_bench.codecs.soundness import SEED

UNBLOCKED: Mapping[str, str] = {"int4:tensor": "int4:256", "int8:tensor": "int8:256"}
"""One scale for everything, and the codec that it is compared with."""

_PIECE = 1 << 22


@dataclass(frozen=True)
class Accuracy:
    """The error of a codec or peer on a data set.

    Attributes:
        subject: Codec or peer.
        dtype: Dtype of the values.
        data: Name of the data set.
        values: Number of values in the data set.
        snr_db: 10 log10(sum x^2 / sum (x - y)^2), in float64; None where every value came back.
        wire_bits: Bits of the message per value.
    """

    subject: str
    dtype: str
    data: str
    values: int
    snr_db: float | None
    wire_bits: float


@dataclass(frozen=True)
class Blocking:
    """The factor by which the root mean square error grows without blocks."""

    unblocked: str
    blocked: str
    dtype: str
    data: str
    ratio: float


def codec_accuracy(codec: Codec, data: str, x: Tensor) -> Accuracy:
    """Encode and decode a data set; decoded values are fp32, which is what they are added to others in."""
    wire = codec.encode(x, seed=SEED if codec.spec.needs_seed else None)
    decoded = codec.decode(wire, x.numel(), x.dtype if codec.spec.is_lossless else torch.float32)
    return accuracy(str(codec.spec), data, x, decoded, wire.numel())


def accuracy(subject: str, data: str, x: Tensor, decoded: Tensor, num_bytes: int) -> Accuracy:
    """The error of a data set that became ``num_bytes`` bytes, and again values."""
    snr, bits = signal_to_noise(x, decoded), 8 * num_bytes / x.numel()
    return Accuracy(subject, dtype_name(x.dtype), data, x.numel(), snr, bits)


def signal_to_noise(x: Tensor, y: Tensor) -> float | None:
    """Decibels, in float64; None if nothing differs."""
    signal = noise = 0.0
    for start in range(0, x.numel(), _PIECE):
        values = x[start : start + _PIECE].double()
        signal += float(values.square().sum())
        noise += float((values - y[start : start + _PIECE].double()).square().sum())
    return 10 * math.log10(signal / noise) if noise else None


def blocking(accuracies: Iterable[Accuracy]) -> list[Blocking]:
    """Error without blocks over error with them, wherever both were measured."""
    by_key: dict[tuple[str, str, str], float] = {
        (each.subject, each.dtype, each.data): each.snr_db for each in accuracies if each.snr_db is not None
    }
    return [
        Blocking(subject, UNBLOCKED[subject], dtype, data, 10 ** ((by_key[blocked] - snr) / 20))
        for (subject, dtype, data), snr in by_key.items()
        if subject in UNBLOCKED and (blocked := (UNBLOCKED[subject], dtype, data)) in by_key
    ]
