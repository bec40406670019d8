"""Codecs with one instruction set after another: each target of the native module is forced in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from thinwire.codecs import Codec
from thinwire.codecs.cpp import _native
from thinwire_bench.codecs.jobs import Buffers, codec_jobs
from thinwire_bench.codecs.soundness import CodecGate, check_sample
from thinwire_bench.codecs.speeds import COPY, CodecSpeed, TimedCall, copy_job, interleave, is_noisy, speeds

TARGET_DIRECTIONS = ("encode", "decode")
"""The directions that are timed with every instruction set."""


def known_targets() -> list[str]:
    """Instruction sets that this processor supports, the plainest first."""
    return _native.targets()


def native_target() -> str:
    """The instruction set that codecs of the backend ``cpp`` use."""
    return _native.target()


@contextmanager
def forced(target: str) -> Iterator[None]:
    """Codecs of the backend ``cpp`` use this instruction set, until the block ends."""
    before = _native.target()
    _native.use_target(target)
    try:
        yield
    finally:
        _native.use_target(before)


def check_targets(codecs: Sequence[Codec], targets: Sequence[str], dtype: torch.dtype) -> list[CodecGate]:
    """Compare codecs of the backend ``cpp`` that encode the dtype with the reference, with every instruction set."""
    gates = []
    for target in targets:
        with forced(target):
            for codec in codecs:
                problem = check_sample(codec, dtype, torch.device("cpu"))
                gates.append(CodecGate(str(codec.spec), _name(dtype), None, problem, target))
    return gates


def target_speeds(
    codecs: Sequence[Codec], targets: Sequence[str], *, dtype: torch.dtype, size: int, rounds: int
) -> tuple[list[CodecSpeed], bool]:
    """Time codecs of the backend ``cpp`` that encode the dtype with every instruction set, on tensors of ``size``
    bytes, all in turns with each other and with memcpy. Returns the speeds, memcpy's among them, and whether memcpy's
    were unsteady."""
    device = torch.device("cpu")
    buffers = Buffers.make(size, dtype, device)
    jobs = [copy_job(buffers.x, buffers.out)]
    bits: dict[str, float] = {}
    for codec in codecs:
        made, bits[str(codec.spec)] = codec_jobs(codec, buffers, fused=False)
        jobs += [_with(job, name) for job in made if job.direction in TARGET_DIRECTIONS for name in targets]
    with forced(_native.target()):
        seconds = interleave(jobs, rounds=rounds, device=device)
    steady = not is_noisy(seconds[[job.subject for job in jobs].index(COPY)])
    return speeds(jobs, seconds, dtype=_name(dtype), size=size, wire_bits=bits), not steady


def _with(job: TimedCall, target: str) -> TimedCall:
    call: Callable[[], object] = job.call

    def with_target() -> object:
        _native.use_target(target)
        return call()

    return replace(job, call=with_target, target=target)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
