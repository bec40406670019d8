"""Time on many ranks: everyone starts together, the slowest counts, and all stop at the same moment."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from thinwire.collectives.group import Control

__all__ = ["Deadline", "Spread", "finish", "in_turn", "timed"]

FEWEST, MOST = 3, 15
"""Samples of anything that is measured."""

_SHORT = 2e-3
"""Seconds below which several calls make one sample: starting together is not exact to the microsecond."""

_CALLS = 8


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds of one call.

    Attributes:
        median: of the samples.
        low: their lower quartile.
        high: their upper quartile.
        samples: how many.
        processor: seconds that a rank's processor works for one, the median, mean over ranks.
    """

    median: float
    low: float
    high: float
    samples: int
    processor: float = 0.0

    @classmethod
    def of(cls, samples: Sequence[float], processor: float = 0.0) -> Spread:
        """Median and quartiles."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1, processor)
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high, len(samples), processor)


class Deadline:
    """An end that all ranks see at the same moment: rank 0's clock decides.

    Args:
        control: joins the ranks.
        seconds: from now.
    """

    def __init__(self, control: Control, seconds: float) -> None:
        self._control, self._end = control, time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left, the same on every rank; a collective call."""
        left: list[float] = self._control.all_gather_object(self._end - time.monotonic())
        return left[0]

    def passed(self) -> bool:
        """Whether none are left; a collective call."""
        return self.left() <= 0

    def share(self, share: float) -> Deadline:
        """An earlier end, after a share of what is left; a collective call."""
        return Deadline(self._control, self.left() * share)


def in_turn(make: Callable[[], Callable[[], None]], copies: int) -> Callable[[], None]:
    """Several calls on data of their own, one after another: none finds its data in the cache, as in training.

    Args:
        make: a call and its data.
        copies: how many.
    """
    calls = itertools.cycle([make() for _ in range(copies)])
    return lambda: next(calls)()


def timed(control: Control, body: Callable[[], None], *, seconds: float, device: torch.device) -> Spread:
    """Time a call that every rank makes.

    Args:
        control: joins the ranks.
        body: the call; it is made once before the clock runs.
        seconds: how long to go on, about; three samples are taken in any case.
        device: whose work to wait for.

    Returns:
        Seconds of one call, of the slowest rank; the same on every rank.
    """
    first = _once(control, body, 1, device)
    calls = _CALLS if first < _SHORT else 1
    wanted = max(FEWEST, min(MOST, int(seconds / max(first * calls, 1e-6))))
    samples = [_clocked(control, body, calls, device) for _ in range(wanted)]
    everyone: list[list[tuple[float, float]]] = control.all_gather_object(samples)
    slowest = [max(seconds for seconds, _ in column) for column in zip(*everyone, strict=True)]
    working = [statistics.median(processor for _, processor in rank) for rank in everyone]
    return Spread.of(slowest, statistics.fmean(working))


def _once(control: Control, body: Callable[[], None], calls: int, device: torch.device) -> float:
    seconds, _ = _clocked(control, body, calls, device)
    everyone: list[float] = control.all_gather_object(seconds)
    return max(everyone)


def _clocked(control: Control, body: Callable[[], None], calls: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a call, and of this process's processor in it."""
    control.barrier()
    begin, begun = time.perf_counter(), time.process_time()
    for _ in range(calls):
        body()
    finish(device)
    return (time.perf_counter() - begin) / calls, (time.process_time() - begun) / calls


def finish(device: torch.device) -> None:
    """Wait for what a device has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
