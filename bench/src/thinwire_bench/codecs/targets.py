"""Codecs with one instruction set after another: each target of the native module is forced in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from thinwire.checkpoint.manifest import dtype_name
from thinwire.codecs import Codec
from thinwire.codecs.cpp import _native
from thinwire_bench.codecs.jobs import Buffers, codec_jobs
from thinwire_bench.codecs.soundness import CodecGate, check_sample
from thinwire_bench.codecs.speeds import TimedCall

TARGET_DIRECTIONS = ("encode", "decode")
"""The directions that are timed with every instruction set."""


known_targets = _native.targets
"""Instruction sets that this processor supports, the plainest first."""

native_target = _native.target
"""The instruction set that codecs of the backend ``cpp`` use."""


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
                gates.append(CodecGate(str(codec.spec), dtype_name(dtype), None, problem, target))
    return gates


def target_jobs(
    codecs: Sequence[Codec], targets: Sequence[str], buffers: Buffers
) -> tuple[list[TimedCall], dict[str, float]]:
    """Calls of codecs of the backend ``cpp`` with every instruction set, each of which stays in use after it, and the
    bits of a codec's message for each value."""
    jobs: list[TimedCall] = []
    bits: dict[str, float] = {}
    for codec in codecs:
        made, bits[str(codec.spec)] = codec_jobs(codec, buffers, fused=False)
        jobs += [_with(job, name) for job in made if job.direction in TARGET_DIRECTIONS for name in targets]
    return jobs, bits


def _with(job: TimedCall, target: str) -> TimedCall:
    call: Callable[[], object] = job.call

    def with_target() -> object:
        _native.use_target(target)
        return call()

    return replace(job, call=with_target, target=target)
