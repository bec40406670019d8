"""The number of optimizer steps that a model has taken."""

from __future__ import annotations

__all__ = ["StepCounter"]


class StepCounter:
    """Counts the optimizer steps of one model. Its runtime writes the number; everything else reads it.

    Attributes:
        taken: Number of optimizer steps taken so far.
    """

    def __init__(self) -> None:
        self.taken = 0
