"""Traces a few steps in full detail: torch's profiler and the lanes' timelines, with all ranks on one clock.

During the steps that a recipe names, every rank runs torch's profiler and records its lanes. Afterwards each rank
writes the profiler's trace. Rank 0 also writes one trace of all ranks with steps, computation, lanes, and the longest
of torch's operations. Other steps are not affected.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from thinwire.agreement import NOTHING, Typed, agree
from thinwire.collectives.group import Control
from thinwire.errors import ThinwireError, UsageError
from thinwire.parallel import ParallelModel
from thinwire.program.timeline import COMPUTE, STEP, WAITING, Span, Timeline, chrome_trace
from thinwire.sharding import api
from thinwire.train.directory import write_atomically

_SPANS: Final[Typed[list[Span]]] = Typed(list[Span])
_READINGS: Final[Typed[tuple[str, list[float]]]] = Typed(tuple[str, list[float]])

MOST_SPANS: Final = 200_000
"""Most spans of steps, computation and lanes in a merged trace of all ranks: 30 MB, which Perfetto opens at once."""
MOST_OPERATIONS: Final = 40_000
"""Most operations of torch in a merged trace; torch's own traces hold all of them."""

_MARK: Final = "thinwire clock"
_NUM_MARKS: Final = 5
_ROUNDS: Final = 11
_LONGEST_NAME: Final = 120
_SHOWN: Final = ("cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_memset")
"""Categories of torch's events in a merged trace: executed work, not the calls that queued it."""


@dataclass(frozen=True)
class Clocks:
    """Differences between the clocks of ranks.

    Attributes:
        offsets: By rank, seconds by which its clock is ahead of rank 0's.
        spread: Median difference in seconds between the offsets of two exchanges, which is the alignment's precision.
    """

    offsets: tuple[float, ...]
    spread: float

    @classmethod
    def compare(cls, names: Sequence[str], readings: Sequence[Sequence[float]]) -> Clocks:
        """Compute the offsets from clock readings right after each of several barriers.

        Ranks leave a barrier at nearly the same time. Ranks on one host share a clock, whose name is theirs, so they
        have the same offset. Readings are, by rank, seconds after each barrier.
        """
        rounds = list(zip(*readings, strict=True))
        alignment: dict[str, tuple[float, float]] = {}
        for name in dict.fromkeys(names):
            ahead = [
                statistics.median(t for t, other in zip(times, names, strict=True) if other == name)
                - statistics.median(t for t, other in zip(times, names, strict=True) if other == names[0])
                for times in rounds
            ]
            offset = statistics.median(ahead)
            alignment[name] = offset, statistics.median(abs(value - offset) for value in ahead)
        return cls(tuple(alignment[name][0] for name in names), max(spread for _, spread in alignment.values()))


class StepTracer:
    """Traces the steps that a recipe names, if it does. All ranks make the same calls."""

    def __init__(
        self,
        steps: tuple[int, int] | None,
        directory: Path,
        model: ParallelModel,
        ranks: Control,
        device: torch.device,
    ) -> None:
        self._range, self._directory = steps, directory
        self._model, self._ranks, self._device = model, ranks, device
        self._is_open = False  # between the beginning of the first and the end of the last of consecutive steps
        self._marks: list[tuple[int, float, float]] = []
        self._begun = 0, 0.0

    def begin(self, step: int) -> None:
        """Call this before a step."""
        if self._range is None or not self._range[0] <= step <= self._range[1]:
            return
        if not self._is_open:
            self._open()
        self._begun = step, time.perf_counter()

    def end(self, *, interrupted: bool) -> str | None:
        """Call this after a step. It writes the traces unless another traced step follows directly, ``interrupted`` by
        no validation and no checkpoint; returns a line for the user if traces were written.

        Raises:
            UsageError: On all ranks, if any of them could not write its trace.
        """
        if not self._is_open or self._range is None:
            return None
        self._marks.append((*self._begun, time.perf_counter()))
        if not interrupted and self._last < self._range[1]:
            return None
        return self._write()

    def _open(self) -> None:
        self._is_open, self._marks = True, []
        self._clocks = _compare_clocks(self._ranks)
        # The profiler logs its start and stop to stderr as errors of the highest severity.
        os.environ.setdefault("KINETO_LOG_LEVEL", "10")
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()
        self._marked: list[float] = []
        for _ in range(_NUM_MARKS):
            with record_function(_MARK):
                self._marked.append(time.perf_counter())
        self._recording = contextlib.ExitStack()
        self._wait()
        # On CUDA timelines count from an event on the idle stream, on CPU they are on the host's clock.
        self._origin = time.perf_counter() if self._device.type == "cuda" else 0.0
        self._timelines = [self._recording.enter_context(api.timeline(chunk)) for chunk in self._model.chunks]
        self._ranks.barrier()

    def _write(self) -> str:
        for chunk in self._model.chunks:
            api.runtime(chunk).drain()  # communication still in flight belongs to these steps
        self._wait()
        self._recording.close()
        self._profile.stop()
        self._is_open = False
        by_rank = agree(self._ranks, self._own_spans, self._unwritten, _SPANS, message=str)
        merged = self._directory / f"{self._name}.json"

        def write() -> None:
            if self._ranks.rank == 0:
                write_atomically(merged, json.dumps(self._merged(by_rank)))

        agree(self._ranks, write, self._unwritten, NOTHING, message=str)
        first = self._marks[0][0]
        which = f"step {first} is" if first == self._last else f"steps {first} to {self._last} are"
        return f"{which} traced: open {merged} at https://ui.perfetto.dev"

    @property
    def _last(self) -> int:
        """Number of the last finished step."""
        return self._marks[-1][0]

    def _unwritten(self, problems: Mapping[int, str]) -> UsageError:
        rank, text = next(iter(problems.items()))
        return UsageError(f"rank {rank} could not write its trace to {self._directory}: {text}")

    @property
    def _name(self) -> str:
        first, last = self._marks[0][0], self._last
        return f"step-{first}" if first == last else f"steps-{first}-{last}"

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _own_spans(self) -> list[Span]:
        """This rank's spans on rank 0's clock, at most its part of those of all ranks; also writes torch's trace."""
        self._directory.mkdir(parents=True, exist_ok=True)
        size = self._ranks.size
        spans = [Span(STEP, f"step {step}", start, end) for step, start, end in self._marks]
        for number, timeline in enumerate(self._timelines):
            spans += _renamed(timeline, number if len(self._timelines) > 1 else None, self._origin)
        kept = [*longest(spans, MOST_SPANS // size), *longest(self._torch_spans(), MOST_OPERATIONS // size)]
        ahead = self._clocks.offsets[self._ranks.rank]
        return [replace(span, start=span.start - ahead, end=span.end - ahead) for span in kept]

    def _torch_spans(self) -> list[Span]:
        """Spans that torch's profiler recorded; also writes its trace, compressed."""
        path = self._directory / f"torch-rank-{self._ranks.rank}-{self._name}.json.gz"
        with tempfile.TemporaryDirectory(dir=self._directory) as scratch:
            plain, packed = Path(scratch) / "trace.json", Path(scratch) / "trace.json.gz"
            self._profile.export_chrome_trace(str(plain))
            content = plain.read_bytes()
            packed.write_bytes(gzip.compress(content, compresslevel=5))
            packed.replace(path)
        return _torch_spans(json.loads(content)["traceEvents"], self._marked)

    def _merged(self, by_rank: Sequence[Sequence[Span]]) -> dict[str, Any]:
        about = {
            "steps": [step for step, _, _ in self._marks],
            "plan": self._model.plan.describe(),
            "clock_offsets_seconds": list(self._clocks.offsets),
            "clock_spread_seconds": self._clocks.spread,
        }
        return {**chrome_trace(dict(enumerate(by_rank))), "otherData": about}


def longest(spans: Iterable[Span], most: int) -> list[Span]:
    known = list(spans)
    return known if len(known) <= most else sorted(known, key=lambda span: span.start - span.end)[:most]


def _renamed(timeline: Timeline, stage: int | None, origin: float) -> list[Span]:
    """A model part's spans on the host's clock; lanes of different pipeline stages on a rank get different tracks."""
    return [
        Span(
            span.track if stage is None or span.track in (COMPUTE, WAITING) else f"{span.track}, part {stage}",
            span.name,
            span.start + origin,
            span.end + origin,
        )
        for span in timeline.spans
    ]


def _torch_spans(events: Sequence[dict[str, Any]], marked: Sequence[float]) -> list[Span]:
    """Complete events of torch's trace, on the host's clock.

    Args:
        events: Events of torch's trace.
        marked: Seconds on the host's clock, read inside each mark. A rank may be preempted between the start of a mark
            and its reading, so the mark with the smallest delay aligns the clocks.
    """
    marks = sorted(float(event["ts"]) for event in events if event.get("name") == _MARK and event.get("ph") == "X")
    if len(marks) != len(marked):
        raise ThinwireError("torch's profiler lost its first events, so its trace has no common clock with the lanes'")
    ahead = min(seconds - start / 1e6 for seconds, start in zip(marked, marks, strict=True))
    shown = [
        event
        for event in events
        if event.get("ph") == "X" and event.get("cat") in _SHOWN and event.get("name") != _MARK
    ]
    threads = list(dict.fromkeys(event["tid"] for event in shown if event["cat"] in ("cpu_op", "user_annotation")))
    tracks = {thread: f"torch thread {number}" for number, thread in enumerate(threads)}
    return [
        Span(
            tracks.get(event["tid"], f"torch stream {event['tid']}"),
            event["name"][:_LONGEST_NAME],
            ahead + float(event["ts"]) / 1e6,
            ahead + (float(event["ts"]) + float(event["dur"])) / 1e6,
        )
        for event in shown
    ]


def _compare_clocks(ranks: Control) -> Clocks:
    readings = []
    for _ in range(_ROUNDS):
        ranks.barrier()
        readings.append(time.perf_counter())
    names, times = zip(*ranks.all_gather_typed((_clock_name(), readings), _READINGS), strict=True)
    return Clocks.compare(names, times)


def _clock_name() -> str:
    """A name that is equal for processes with the same monotonic clock: processes under the same boot of one kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return socket.gethostname()
