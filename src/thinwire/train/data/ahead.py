"""The batches of the next step, made while the present one computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, NamedTuple

from thinwire.train.data.samples import Batch


class Duration(NamedTuple):
    """Steps, and the seconds spent in them or waiting for their data."""

    steps: int = 0
    seconds: float = 0.0

    def plus(self, seconds: float, steps: int = 1) -> Duration:
        return Duration(self.steps + steps, self.seconds + seconds)


NONE: Final = Duration()


class BatchesAhead:
    """Makes the micro-batches of a rank in a thread, one step ahead of training."""

    def __init__(self, make: Callable[[int], list[Batch]]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, "thinwire-batches")
        self._position: int | None = None
        self._batches: Future[list[Batch]] | None = None
        self._waits = NONE

    def prepare(self, position: int) -> Future[list[Batch]]:
        """Begin to make the batches of the step that begins at a position."""
        self._position, self._batches = position, self._thread.submit(self._make, position)
        return self._batches

    def take(self, position: int, following: int) -> list[Batch]:
        """Give the batches of a step, made anew if they are of another position, and begin to make those of the next
        one.

        Raises:
            DataError: They cannot be made.
        """
        batches = self._batches
        if batches is None or position != self._position:
            batches = self.prepare(position)
        if not batches.done():
            started = time.perf_counter()
            wait([batches])
            self._waits = self._waits.plus(time.perf_counter() - started)
        self.prepare(following)
        return batches.result()

    def take_waits(self) -> Duration:
        """The waits since the last call."""
        waits, self._waits = self._waits, NONE
        return waits
