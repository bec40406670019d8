"""A case: the smallest piece of the GPU check that has a result of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.scale import Scale

__all__ = ["GIB", "Case", "Cases", "Missing", "Report"]

GIB: Final = 1 << 30

Report = Callable[[str], None]
"""Told in a line of text whenever something begins."""


class Missing(Exception):
    """This machine lacks what a case needs; the message says what."""


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: Its name within the part.
        run: Measures.
        seconds: Seconds that it is expected to take on a card; it does not begin with less time left, and is ended
            when it has taken several times as much.
        needs: Bytes of the card's memory that it needs.
    """

    name: str
    run: Callable[[Report], Outcome]
    seconds: float
    needs: int = 0


Cases = Callable[[Scale, ExitStack], list[Case]]
"""What a part is: makes its cases, most valuable first. What they share, for example ranks, is made when a case needs
it and closed by the stack."""
