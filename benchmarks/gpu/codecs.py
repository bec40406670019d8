"""Part: every codec against a device-to-device copy, and against the reference backend byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Final

import torch
from benchmarks.gpu.case import Case, Report
from benchmarks.gpu.outcome import Check, Outcome
from benchmarks.gpu.scale import Scale

from thinwire.codecs import Codec, get
from thinwire.report.sheet import Sheet
from thinwire.spec import CodecSpec
from thinwire.spec.codec import encodable_dtypes
from thinwire.units import format_bytes
from thinwire_bench.codecs.bench import CODECS
from thinwire_bench.codecs.jobs import Buffers, codec_jobs
from thinwire_bench.codecs.soundness import SEED, check_sample, check_timed
from thinwire_bench.codecs.speeds import CodecSpeed, copy_job, interleave, speeds

__all__ = ["GOALS", "cases", "speed_checks"]

GOALS: Final = {"int8:256": 0.8, "int8:2048": 0.8, "int4:256": 0.6, "int4:2048": 0.6}
"""Wanted share of the copy's speed, by codec, both ways."""

LARGE: Final = 256 << 20
"""Bytes from which the goals hold: below, launches take longer than memory."""

_REHEARSED: Final = ("int8:256", "int4:256", "bf16")


def cases(scale: Scale, stack: ExitStack) -> list[Case]:
    """Encode and decode of every codec and dtype, in turns with a copy of the same tensor: first the largest tensor of
    all, then smaller ones."""
    del stack
    pairs = [
        (name, dtype)
        for dtype in scale.dtypes
        for name in (CODECS if scale.is_whole else _REHEARSED)
        if dtype in encodable_dtypes(CodecSpec(name))
    ]
    pairs.sort(key=lambda pair: pair[0] not in GOALS)
    large = [
        Case(f"{name}, {dtype}", partial(_measured, scale, name, dtype, scale.sizes[:1]), 4) for name, dtype in pairs
    ]
    small = [
        Case(f"{name}, {dtype}, smaller", partial(_measured, scale, name, dtype, scale.sizes[1:]), 2)
        for name, dtype in pairs
    ]
    return large + small


def _measured(scale: Scale, name: str, dtype: str, sizes: Sequence[int], report: Report) -> Outcome:
    report(f"{name}, {dtype}")
    device = torch.device(scale.device)
    codec, kind = get(name, device=device), getattr(torch, dtype)
    sound = [_soundness(f"{name}, {dtype}, sample", check_sample(codec, kind, device))]
    measured: list[CodecSpeed] = []
    if sound[0].met:
        for size in sizes:
            rows, problem = _timed(codec, kind, size, scale.codec_rounds, device)
            sound.append(_soundness(f"{name}, {dtype}, {format_bytes(size)}", problem))
            measured += [] if problem else rows
    return Outcome(
        (_share_sheet(measured, name, dtype, sizes),),
        (*sound, *speed_checks(measured)),
        data={"speeds": [asdict(speed) for speed in measured]},
    )


def speed_checks(measured: Sequence[CodecSpeed]) -> list[Check]:
    """The goals of the codecs, for large tensors."""
    return [
        Check(
            f"{speed.subject} {speed.direction}, {speed.dtype}, {format_bytes(speed.size)}",
            f"{speed.share:.0%} of a copy",
            f"at least {GOALS[speed.subject]:.0%}",
            speed.share >= GOALS[speed.subject],
        )
        for speed in measured
        if speed.subject in GOALS and speed.size >= LARGE and speed.dtype != "float16"
    ]


def _soundness(what: str, problem: str | None) -> Check:
    return Check(what, problem or "equal", "equal to the reference backend", problem is None)


def _timed(
    codec: Codec, dtype: torch.dtype, size: int, rounds: int, device: torch.device
) -> tuple[list[CodecSpeed], str | None]:
    """Speeds of both directions, and what is wrong with the tensor that was encoded and decoded, if anything."""
    buffers = Buffers.make(size, dtype, device)
    seed = SEED if codec.spec.needs_seed else None
    wire = codec.encode(buffers.x, seed=seed)
    problem = check_timed(codec, buffers.x, codec.decode(wire, buffers.x.numel(), dtype, out=buffers.out))
    jobs, bits = codec_jobs(codec, buffers, fused=False)
    jobs = [copy_job(buffers.x, buffers.out), *(job for job in jobs if job.direction in {"encode", "decode"})]
    seconds = interleave(jobs, rounds=rounds, device=device)
    name = str(dtype).removeprefix("torch.")
    rows = speeds(jobs, seconds, dtype=name, size=size, wire_bits={str(codec.spec): bits})
    return rows[1:], problem


def _share_sheet(measured: Sequence[CodecSpeed], name: str, dtype: str, sizes: Sequence[int]) -> Sheet:
    """Two columns for every size; the page joins the rows of all codecs."""
    cells = {(each.size, each.direction): each for each in measured}
    ways = [(size, direction) for size in sizes for direction in ("encode", "decode")]
    shares = ["" if way not in cells else f"{cells[way].share:.0%}" for way in ways]
    columns = ("codec", "dtype", *(f"{direction} {format_bytes(size)}" for size, direction in ways))
    return Sheet("share of the speed of a device-to-device copy", columns, 2, [[name, dtype, *shares]])
