"""Jobs take turns: what each takes, and how much of a plain copy's speed that is."""

from __future__ import annotations

import ctypes
import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

COPY: Final = "memcpy"
"""The subject of the job that all others are held against."""

_SHORTEST_TURN = 3e-3
_MOST_CALLS = 200
_NOISE = 0.1


@dataclass(frozen=True)
class TimedCall:
    """Something to be timed.

    Attributes:
        subject: A codec, a peer, or :data:`COPY`.
        direction: What the call does, for example ``encode``.
        num_bytes: Bytes of the uncompressed tensors, per call.
        call: The call to time; on CUDA it only enqueues work.
        target: Instruction set that the call forces, if it does.
    """

    subject: str
    direction: str
    num_bytes: int
    call: Callable[[], object]
    target: str | None = None


@dataclass(frozen=True)
class CodecSpeed:
    """The speed of a timed call.

    Attributes:
        subject: A codec, a peer, or ``memcpy``.
        direction: ``encode``, ``decode``, ``decode_add``, ``encode_slices``, ``decode_sum``, ``decode_sum_encode`` or
            ``copy``.
        dtype: Dtype of the tensor.
        size: Size of the tensor in bytes.
        num_bytes: Bytes that a call counts for: ``size`` times the number of tensors that it reads or writes.
        wire_bits: Bits of the message per value; None for ``memcpy``.
        gb_per_s: ``num_bytes`` over the median time, in 1e9 bytes.
        gb_per_s_min: Speed of the slowest round, in GB/s.
        gb_per_s_max: Speed of the fastest round, in GB/s.
        share: Share of memcpy's speed, as a ratio of medians.
        share_min: Smallest share within a round.
        share_max: Largest share within a round.
        seconds: Seconds per call, of every round.
        target: Instruction set that was forced; None where the best one was used.
    """

    subject: str
    direction: str
    dtype: str
    size: int
    num_bytes: int
    wire_bits: float | None
    gb_per_s: float
    gb_per_s_min: float
    gb_per_s_max: float
    share: float
    share_min: float
    share_max: float
    seconds: tuple[float, ...]
    target: str | None = None


def copy_job(source: Tensor, target: Tensor) -> TimedCall:
    """A copy of a tensor: libc's memcpy on CPU, on one thread; the device's own on CUDA."""
    num_bytes = source.numel() * source.element_size()
    if source.device.type != "cpu":
        return TimedCall(COPY, "copy", num_bytes, lambda: target.copy_(source))
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    memcpy.restype = ctypes.c_void_p
    destination, origin = target.data_ptr(), source.data_ptr()
    return TimedCall(COPY, "copy", num_bytes, lambda: memcpy(destination, origin, num_bytes))


def interleave(jobs: Sequence[TimedCall], *, rounds: int, device: torch.device, seed: int = 0) -> list[list[float]]:
    """Seconds per call of each job in each round.

    A first round warms up and tells how many calls a turn needs to last a few milliseconds. In every further round
    each job has one turn, in a new random order.

    Args:
        jobs: Calls to time.
        rounds: Rounds that count.
        device: Device whose clock is used.
        seed: Seed of the random order.
    """
    clock = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    for job in jobs:
        job.call()
    calls = [min(_MOST_CALLS, max(1, round(_SHORTEST_TURN / clock(job.call, 1)))) for job in jobs]
    seconds: list[list[float]] = [[] for _ in jobs]
    order = list(range(len(jobs)))
    shuffle = random.Random(seed).shuffle
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            shuffle(order)
            for index in order:
                seconds[index].append(clock(jobs[index].call, calls[index]))
    finally:
        gc.enable()
    return seconds


def speeds(
    jobs: Sequence[TimedCall],
    seconds: Sequence[Sequence[float]],
    *,
    dtype: str,
    size: int,
    wire_bits: Mapping[str, float],
) -> list[CodecSpeed]:
    """Figures of a bench, from the calls, one of them memcpy, and what :func:`interleave` returned. ``size`` is bytes
    of the tensor, and ``wire_bits`` bits of the message per value."""
    (copy,) = [index for index, job in enumerate(jobs) if job.subject == COPY]
    copied = [jobs[copy].num_bytes / taken for taken in seconds[copy]]
    copied_median = jobs[copy].num_bytes / statistics.median(seconds[copy])
    speeds = []
    for job, taken in zip(jobs, seconds, strict=True):
        by_round = [job.num_bytes / duration for duration in taken]
        median = job.num_bytes / statistics.median(taken)
        shares = [ours / theirs for ours, theirs in zip(by_round, copied, strict=True)]
        speeds.append(
            CodecSpeed(
                subject=job.subject,
                direction=job.direction,
                dtype=dtype,
                size=size,
                num_bytes=job.num_bytes,
                wire_bits=wire_bits.get(job.subject),
                gb_per_s=median / 1e9,
                gb_per_s_min=min(by_round) / 1e9,
                gb_per_s_max=max(by_round) / 1e9,
                share=median / copied_median,
                share_min=min(shares),
                share_max=max(shares),
                seconds=tuple(taken),
                target=job.target,
            )
        )
    return speeds


def is_noisy(seconds: Sequence[float]) -> bool:
    """Whether the middle half of a copy's rounds lies further apart than a tenth of the median."""
    if len(seconds) < 2:
        return False
    lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return upper - lower > _NOISE * median


def _cpu_seconds(call: Callable[[], object], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - started) / calls


_QUEUEING = 300_000
"""Clocks of a device, about 0.15 ms, in which the host queues a call."""


def _cuda_seconds(call: Callable[[], object], calls: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    # The device idles until all calls are queued: a launch takes the host about 55 us, longer than a copy of 64 MiB.
    torch.cuda._sleep(_QUEUEING * calls)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls
