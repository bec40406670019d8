"""Weights before and after a step, and what the step takes: as a delta, as others send it, and at best."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import xxhash
import zstandard
from torch import Tensor

from thinwire.codecs.delta import Delta
from thinwire.report import Sheet
from thinwire_bench.codecs.data import SmallLlama
from thinwire_bench.codecs.soundness import same_bits
from thinwire_bench.codecs.speeds import COPY, TimedCall, copy_job, interleave

RATES: Final = (1e-6, 3e-6, 1e-5)

Words = npt.NDArray[np.uint16]
Step = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DeltaRow:
    """One step.

    Attributes:
        data: Which weights.
        rate: Learning rate.
        values: How many weights.
        changed: Share of them whose bf16 bits change.
        entropy: Empirical entropy of the steps in units in the last place, in bits per weight.
        given_exponent: The same given the exponents of the old values.
        bits: Bits per weight of our message.
        others: The same of each of :data:`OTHERS`.
        gb_per_s: Median over the rounds, in 1e9 bytes of the old tensor, of each timed call.
        seconds: Every round of each timed call.
    """

    data: str
    rate: float
    values: int
    changed: float
    entropy: float
    given_exponent: float
    bits: float
    others: Mapping[str, float]
    gb_per_s: Mapping[str, float]
    seconds: Mapping[str, Sequence[float]]


def measure(
    num_values: int, steps: int, rounds: int, report: Callable[[str], None] = lambda line: None
) -> list[DeltaRow]:
    """Steps at each rate of ``num_values`` synthetic weights, and of a small Llama that was trained for ``steps``
    before; calls are timed in rounds, on one thread."""
    report("making synthetic weights")
    rows = [_row("synthetic", rate, synthetic(num_values, rate), rounds) for rate in RATES]
    report("training a small Llama")
    return rows + [_row("small Llama", rate, step, rounds) for rate, step in _of_a_model(steps)]


def sheets(rows: Sequence[DeltaRow]) -> list[Sheet]:
    """Bits, and speeds."""

    def keys(row: DeltaRow) -> list[str]:
        return [row.data, f"{row.rate:.0e}"]

    bits = [
        [
            *keys(row),
            f"{row.changed:.2%}",
            f"{row.entropy:.3f}",
            f"{row.given_exponent:.3f}",
            f"{row.bits:.3f}",
            f"{row.bits / row.given_exponent:.3f}",
            *(f"{other:.3f} ({row.bits / other:.2f})" for other in row.others.values()),
        ]
        for row in rows
    ]
    columns = ["weights", "rate", "changed", "entropy", "given exponent", "delta", "of that", *OTHERS]
    calls = list(rows[0].gb_per_s)
    speeds = [[*keys(row), *(f"{row.gb_per_s[call]:.2f}" for call in calls)] for row in rows]
    return [
        Sheet("bits per weight, and delta's share of the others'", columns, 2, bits),
        Sheet("GB/s of old weights, one thread", ["weights", "rate", *calls], 2, speeds),
    ]


# ----------------------------------------------------------------------------------------------------------- steps


def synthetic(num_values: int, rate: float, seed: int = 0) -> Step:
    """N(0, 0.02), a tenth of it three times as wide, and the sixth step of Adam on gradients that are noise."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(num_values, generator=generator) * 0.02
    weights[: num_values // 10] *= 3
    mean, square, old = torch.zeros(num_values), torch.zeros(num_values), weights.bfloat16()
    for step in range(1, 7):
        gradient = torch.randn(num_values, generator=generator)
        mean.lerp_(gradient, 0.1)
        square.lerp_(gradient.square(), 0.001)
        old = weights.bfloat16()
        weights -= rate * (mean / (1 - 0.9**step)) / (square / (1 - 0.999**step)).sqrt()
    return old, weights.bfloat16()


def _of_a_model(steps: int) -> Iterator[tuple[float, Step]]:
    """A step at each rate of a Llama that was trained at 1e-3 before, the optimizer's state included."""
    small = SmallLlama(layers=6, ffn=688, report=lambda line: None, weight_decay=0.0)
    model, optim = small.model, small.optim

    def weights() -> Tensor:
        return torch.cat([parameter.detach().bfloat16().view(-1) for parameter in model.parameters()])

    for index in range(steps):
        small.step(index)
    state = copy.deepcopy((model.state_dict(), optim.state_dict()))
    for rate in RATES:
        model.load_state_dict(state[0])
        optim.load_state_dict(copy.deepcopy(state[1]))
        optim.param_groups[0]["lr"] = rate
        for index in range(steps, steps + 3):
            small.step(index)
        old = weights()
        small.step(steps + 3)
        yield rate, (old, weights())


# ------------------------------------------------------------------------------------------------------------ bits


def _row(data: str, rate: float, step: Step, rounds: int) -> DeltaRow:
    old, new = (_words(x) for x in step)
    exponent = old >> 7 & 0xFF
    sizes = _ordered(new) - _ordered(old)
    given = sum(_entropy(sizes[exponent == value]) for value in np.unique(exponent))
    message = Delta().encode(*step)
    assert same_bits(Delta().apply(step[0], message), step[1]), f"{data} at {rate}: not the new weights"
    seconds = _timed(step, message, rounds)
    return DeltaRow(
        data=data,
        rate=rate,
        values=len(old),
        changed=float((old != new).mean()),
        entropy=_entropy(sizes) / len(old),
        given_exponent=given / len(old),
        bits=8 * message.numel() / len(old),
        others={name: 8 * encode(old, new) / len(old) for name, encode in OTHERS.items()},
        gb_per_s={name: old.nbytes / statistics.median(taken) / 1e9 for name, taken in seconds.items()},
        seconds=seconds,
    )


def _words(x: Tensor) -> Words:
    words: Words = x.view(torch.uint16).numpy()
    return words


def _ordered(words: Words) -> npt.NDArray[np.int32]:
    """Numbers as integers in their order, so that neighbours differ by one."""
    x = words.astype(np.int32)
    return np.where(x & 0x8000, 0xFFFF - x, x | 0x8000).astype(np.int32)


def _entropy(numbers: npt.NDArray[np.int32]) -> float:
    """Bits of all of them, by how often each one is there."""
    counts = np.unique(numbers, return_counts=True)[1]
    return float(-(counts * np.log2(counts / len(numbers))).sum())


# ---------------------------------------------------------------------------------------------------------- others


def _gaps(places: npt.NDArray[np.int64], *narrow: type[np.unsignedinteger[Any]]) -> bytes:
    """Distances between changed places, in the narrowest of these types that holds all."""
    gaps = np.diff(places, prepend=0)
    largest = int(gaps.max(initial=0))
    kind = next((kind for kind in narrow if largest <= np.iinfo(kind).max), np.uint32)
    return gaps.astype(kind).tobytes()


def _zstd(data: bytes, level: int) -> int:
    return len(zstandard.compress(data, level))


def _verl(old: Words, new: Words) -> int:
    return 6 * int((old != new).sum())


def _nemo(old: Words, new: Words) -> int:
    places = np.flatnonzero(old != new)
    return _zstd(_gaps(places, np.uint16) + (old ^ new)[places].tobytes(), 1)


def _pulse(old: Words, new: Words) -> int:
    places = np.flatnonzero(old != new)
    return _zstd(_gaps(places, np.uint8, np.uint16) + new[places].tobytes(), 3)


OTHERS: Final[Mapping[str, Callable[[Words, Words], int]]] = {
    "verl": _verl,
    "NeMo-RL": _nemo,
    "slime": lambda old, new: _zstd((old ^ new).tobytes(), 1),
    "SkyRL": lambda old, new: _zstd((old ^ new).tobytes(), 3),
    "PULSE": _pulse,
}
"""Bytes of a step as other systems send it, written from their descriptions: verl, int32 indices and bf16 values;
NeMo-RL, gaps of indices and XOR of values by zstd-1; slime and SkyRL, XOR of everything by zstd-1 and zstd-3; PULSE,
gaps of indices and new values by zstd-3."""


# ---------------------------------------------------------------------------------------------------------- speeds


def _timed(step: Step, message: Tensor, rounds: int) -> dict[str, list[float]]:
    """Our calls beside slime's: numpy's XOR, zstd-1 and a checksum of the result by xxh3."""
    (old, new), delta = step, Delta()
    before, after = _words(old), _words(new)
    compressed = zstandard.compress((before ^ after).tobytes(), 1)
    room = torch.empty(delta.max_wire_bytes(old.numel(), old.dtype), dtype=torch.uint8)
    out, target = torch.empty_like(old), torch.empty_like(old)

    def publish() -> object:
        return zstandard.compress((before ^ after).tobytes(), 1), xxhash.xxh3_128_digest(after.data)

    def receive() -> object:
        result = before ^ np.frombuffer(zstandard.decompress(compressed), np.uint16)
        return result, xxhash.xxh3_128_digest(result.data)

    jobs = [
        TimedCall("delta", "encode", old.nbytes, lambda: delta.encode(old, new, out=room)),
        TimedCall("delta", "apply", old.nbytes, lambda: delta.apply(old, message, out)),
        TimedCall("slime", "encode", old.nbytes, publish),
        TimedCall("slime", "apply", old.nbytes, receive),
        copy_job(old, target),
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = interleave(jobs, rounds=rounds, device=torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)
    names = [job.subject if job.subject == COPY else f"{job.subject} {job.direction}" for job in jobs]
    return dict(zip(names, seconds, strict=True))
