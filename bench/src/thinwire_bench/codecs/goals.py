"""The goals of the codecs, and whether a run reached them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from thinwire.units import format_bytes
from thinwire_bench.codecs.accuracy import Accuracy
from thinwire_bench.codecs.speeds import COPY, CodecSpeed

SNR_GOALS: Final[dict[str, dict[str, float]]] = {
    "int8:256": {"normal": 43.1, "student": 34.9, "gradients": 43.2, "weights": 43.4, "activations": 43.9},
    "int4:256": {"normal": 19.9, "student": 13.1, "gradients": 19.9, "weights": 20.1, "activations": 20.3},
    "int4:256,hadamard": {"normal": 19.6, "student": 20.0, "gradients": 19.7, "weights": 19.6, "activations": 19.3},
}
"""Decibels that a study of 16 million values reached; the model's values were those of another small model."""

_SHARES = ((64 << 20, 0.8), (512 << 20, 0.5))
_DEVICE_SHARE = 0.8
_PLAINEST = "baseline"  # what every CPU of an architecture has; those that are in use have more
_ZFPY, _EAGER = 3.0, 20.0


@dataclass(frozen=True)
class CodecGoal:
    """One figure that was aimed at; ``wanted`` is the smallest that reaches the goal."""

    goal: str
    subject: str
    measured: float
    wanted: float
    met: bool


def goals(speeds: Sequence[CodecSpeed], accuracies: Sequence[Accuracy], *, on_cpu: bool) -> list[CodecGoal]:
    """All goals that a run says something about; on CPU, the copy is libc's memcpy."""
    shares = _host_shares(speeds) if on_cpu else _device_shares(speeds)
    return [*shares, *_zfpy(speeds), *_eager(speeds), *_snr(accuracies)]


def _host_shares(speeds: Iterable[CodecSpeed]) -> Iterator[CodecGoal]:
    for each in speeds:
        wanted = dict(_SHARES).get(each.size)
        if (
            each.target != _PLAINEST
            and wanted
            and each.subject in {"int8:256", "int4:256"}
            and each.direction in {"encode", "decode"}
        ):
            yield _goal("share of memcpy", _subject(each), each.share, wanted)


def _device_shares(speeds: Iterable[CodecSpeed]) -> Iterator[CodecGoal]:
    for each in speeds:
        if each.subject.startswith("int") and ":tensor" not in each.subject:
            yield _goal("share of a device copy", _subject(each), each.share, _DEVICE_SHARE)


def _zfpy(speeds: Sequence[CodecSpeed]) -> Iterator[CodecGoal]:
    for theirs in speeds:
        if theirs.subject.startswith("zfpy rate "):
            ours = _same(speeds, theirs, "zfp:" + theirs.subject.removeprefix("zfpy rate "))
            if ours:
                yield _goal("times zfpy", _subject(ours), ours.gb_per_s / theirs.gb_per_s, _ZFPY)


def _eager(speeds: Sequence[CodecSpeed]) -> Iterator[CodecGoal]:
    for theirs in speeds:
        if theirs.subject == "torch eager int8:256" and theirs.dtype == "bfloat16":
            ours = _same(speeds, theirs, "int8:256")
            if ours:
                yield _goal("times torch eager", _subject(ours), ours.gb_per_s / theirs.gb_per_s, _EAGER)


def _snr(accuracies: Iterable[Accuracy]) -> Iterator[CodecGoal]:
    for each in accuracies:
        wanted = SNR_GOALS.get(each.subject, {}).get(each.data)
        if wanted and each.dtype == "float32" and each.snr_db is not None:
            yield _goal("SNR in dB", f"{each.subject}, {each.data}", round(each.snr_db, 1), wanted)


def _goal(goal: str, subject: str, measured: float, wanted: float) -> CodecGoal:
    return CodecGoal(goal, subject, measured, wanted, measured >= wanted)


def _same(speeds: Iterable[CodecSpeed], other: CodecSpeed, subject: str) -> CodecSpeed | None:
    """The speed of another subject in the same direction of the same bench."""
    best = (each for each in speeds if each.target is None)
    key = (subject, other.direction, other.dtype, other.size)
    return next((each for each in best if (each.subject, each.direction, each.dtype, each.size) == key), None)


def _subject(speed: CodecSpeed) -> str:
    assert speed.subject != COPY
    forced = f", {speed.target}" if speed.target else ""
    return f"{speed.subject} {speed.direction}, {speed.dtype}, {format_bytes(speed.size)}{forced}"
