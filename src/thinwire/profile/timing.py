"""Timing on many ranks: all ranks start together, the slowest one counts, and all stop after the same sample."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from thinwire.agreement import Typed
from thinwire.collectives.group import Control

Call = Callable[[], object]
"""What is timed; its result is not used."""

SECONDS: Final[Typed[float]] = Typed(float)
PAIR: Final[Typed[tuple[float, float]]] = Typed(tuple[float, float])
PAIRS: Final[Typed[list[tuple[float, float]]]] = Typed(list[tuple[float, float]])

FEWEST, MOST = 3, 15
"""Minimum and maximum number of samples of a measurement."""

_SHORT = 2e-3
"""Seconds below which a sample has several calls, because ranks do not start at exactly the same microsecond."""

_CALLS = 8

_LASTING = 0.012
"""Seconds that a sample of calls which never wait should last: ranks that share a core take turns of some milliseconds,
and a shorter sample would have the core to itself."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds of one call: median and quartiles of the samples, and processor seconds per rank."""

    median: float
    low: float
    high: float
    processor: float = 0.0

    @classmethod
    def of(cls, samples: Sequence[float], processor: float = 0.0) -> Spread:
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], processor)
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high, processor)

    @property
    def row(self) -> dict[str, Any]:
        """The seconds, by their names in a row of a profile."""
        return {"seconds": self.median, "low": self.low, "high": self.high}


class Deadline:
    """A deadline on which all ranks agree: rank 0's clock decides.

    Args:
        control: Connects all ranks.
        seconds: Seconds from now until the deadline.
    """

    def __init__(self, control: Control, seconds: float) -> None:
        self._control, self._end = control, time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, the same on every rank; a collective call."""
        return self._control.all_gather_typed(self._end - time.monotonic(), SECONDS)[0]

    def passed(self) -> bool:
        """Whether no time is left; a collective call."""
        return self.left() <= 0

    def share(self, share: float) -> Deadline:
        """An earlier deadline, after a share of the time left; a collective call."""
        return Deadline(self._control, self.left() * share)


def in_turn(make: Callable[[], Call], copies: int) -> Call:
    """One call that cycles through several copies of a call. As in training, none finds its data in the cache."""
    calls = itertools.cycle([make() for _ in range(copies)])
    return lambda: next(calls)()


def timed(control: Control, body: Call, *, seconds: float, device: torch.device, waits: bool = True) -> Spread:
    """Time a call that every rank makes.

    Args:
        control: Connects all ranks.
        body: The call; it runs once before timing starts, three times if it does not wait.
        seconds: Approximate duration; at least three samples are taken.
        device: Device whose work must finish.
        waits: Whether the call waits for other ranks. Calls that do not are timed for so long that ranks which share a
            core take turns.

    Returns:
        Seconds of one call on the slowest rank; the same on every rank.
    """
    first = _once(control, body, device)
    calls = _CALLS if first < _SHORT else 1
    if not waits:
        # One of them may have lost its turn of the processor.
        first = min(first, *(_once(control, body, device) for _ in range(2)))
        calls = max(calls, int(min(_LASTING, seconds / FEWEST) / max(first, 1e-6)))
    wanted = max(FEWEST, min(MOST, int(seconds / max(first * calls, 1e-6))))
    samples = [clocked(control, body, calls, device) for _ in range(wanted)]
    everyone = control.all_gather_typed(samples, PAIRS)
    slowest = [max(seconds for seconds, _ in column) for column in zip(*everyone, strict=True)]
    working = [statistics.median(processor for _, processor in rank) for rank in everyone]
    return Spread.of(slowest, statistics.fmean(working))


def _once(control: Control, body: Call, device: torch.device) -> float:
    seconds, _ = clocked(control, body, 1, device)
    return max(control.all_gather_typed(seconds, SECONDS))


def clocked(control: Control, body: Call, calls: int, device: torch.device) -> tuple[float, float]:
    """Wall-clock seconds and processor seconds of one of several calls in this process; all ranks begin together."""
    control.barrier()
    begin, begun = time.perf_counter(), time.process_time()
    for _ in range(calls):
        body()
    finish(device)
    return (time.perf_counter() - begin) / calls, (time.process_time() - begun) / calls


def finish(device: torch.device) -> None:
    """Wait for a device to finish its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
