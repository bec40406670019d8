"""The batches of the next step, made while the present one computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from thinwire.train.data.samples import Batch


class Waits(NamedTuple):
    """How often training waited for its data, in steps, and how long, in seconds."""

    steps: int = 0
    seconds: float = 0.0


class BatchesAhead:
    """Makes the micro-batches of a rank in a thread, one step ahead of training."""

    def __init__(self, make: Callable[[int], list[Batch]]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, "thinwire-batches")
        self._position: int | None = None
        self._batches: Future[list[Batch]] | None = None
        self._waits = Waits()

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
            self._waits = Waits(self._waits.steps + 1, self._waits.seconds + time.perf_counter() - started)
        self.prepare(following)
        return batches.result()

    def take_waits(self) -> Waits:
        """The waits since the last call."""
        waits, self._waits = self._waits, Waits()
        return waits
