"""Seeds for codecs that round at random."""

from __future__ import annotations

from thinwire.program import Lane

__all__ = ["Seeds"]


class Seeds:
    """Different for every message of a training run, and the same again when it is resumed from a checkpoint.

    Args:
        rank: this rank.

    Attributes:
        step: optimizer steps taken so far.
    """

    def __init__(self, rank: int) -> None:
        self.step = 0
        self._rank = rank
        self._last = (-1, 0)

    def of_unit(self, lane: Lane, unit: int) -> int:
        """For a unit's parameters: the same until the next step, so that forward and backward see the same values."""
        return self._joined(list(Lane).index(lane), unit)

    def next(self) -> int:
        """For one more reduction of gradients: a step's reductions run in the same order on every rank."""
        step, count = self._last
        count = count + 1 if step == self.step else 0
        self._last = (self.step, count)
        return self._joined(len(Lane), count)

    def _joined(self, kind: int, number: int) -> int:
        return ((self.step * 8 + kind << 20) + number << 20) + self._rank
