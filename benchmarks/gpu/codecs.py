"""Part: every codec against a device-to-device copy, and against the reference backend byte by byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Final

import torch
from benchmarks.gpu.outcome import Check, Outcome
from benchmarks.gpu.scale import Scale

from thinwire.codecs import Codec, get
from thinwire.report.sheet import Sheet
from thinwire.spec import CodecSpec
from thinwire.spec.codec import encodable_dtypes
from thinwire.units import format_bytes
from thinwire_bench.codecs.jobs import Buffers, codec_jobs
from thinwire_bench.codecs.soundness import SEED, check_sample, check_timed
from thinwire_bench.codecs.speeds import CodecSpeed, copy_job, interleave, speeds

__all__ = ["GOALS", "codec_speeds", "speed_checks"]

GOALS: Final = {"int8:256": 0.8, "int8:2048": 0.8, "int4:256": 0.6, "int4:2048": 0.6}
"""Wanted share of the copy's speed, by codec, both ways."""

LARGE: Final = 64 << 20
"""Bytes from which the goals hold: below, launches take longer than memory."""


def codec_speeds(scale: Scale, report: Callable[[str], None]) -> Outcome:
    """Part: encode and decode of every codec, dtype and size, in turns with a copy of the same tensor."""
    device, started = torch.device(scale.device), time.monotonic()
    sound: list[Check] = []
    measured: list[CodecSpeed] = []
    late: list[str] = []
    for name in scale.codecs:
        for dtype in scale.dtypes:
            if dtype not in encodable_dtypes(CodecSpec(name)):
                continue
            if time.monotonic() - started > scale.codec_seconds:
                late.append(f"{name} {dtype}")
                continue
            report(f"{name}, {dtype}")
            codec, kind = get(name, device=device), getattr(torch, dtype)
            problem = check_sample(codec, kind, device)
            sound.append(_soundness(f"{name}, {dtype}, sample", problem))
            if problem is not None:
                continue
            for size in scale.sizes:
                rows, problem = _timed(codec, kind, size, scale.codec_rounds, device)
                sound.append(_soundness(f"{name}, {dtype}, {format_bytes(size)}", problem))
                measured += [] if problem else rows
    notes = [
        "A share compares a codec with a copy of the same tensor in the same rounds; bytes of the tensor count, not "
        f"those of the message. Goals hold from {format_bytes(LARGE)}; below, launches take longer than memory."
    ]
    if late:
        notes.append(f"Time was over before these were measured: {', '.join(late)}.")
    return Outcome(
        (_share_sheet(measured, scale),),
        (*sound, *speed_checks(measured), *(Check(each, "not measured", "in time", False) for each in late)),
        tuple(notes),
        {"speeds": [asdict(speed) for speed in measured]},
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
        if speed.subject in GOALS and speed.size >= LARGE
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


def _share_sheet(measured: Sequence[CodecSpeed], scale: Scale) -> Sheet:
    """A row for every codec and dtype, two columns for every size."""
    cells = {(each.subject, each.dtype, each.size, each.direction): each for each in measured}
    ways = [(size, direction) for size in scale.sizes for direction in ("encode", "decode")]
    rows = []
    for subject, dtype in dict.fromkeys((each.subject, each.dtype) for each in measured):
        speeds_of = [cells.get((subject, dtype, *way)) for way in ways]
        rows.append([subject, dtype, *("" if each is None else f"{each.share:.0%}" for each in speeds_of)])
    columns = ("codec", "dtype", *(f"{direction} {format_bytes(size)}" for size, direction in ways))
    return Sheet("share of the speed of a device-to-device copy", columns, 2, rows)
