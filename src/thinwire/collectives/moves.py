"""A collective is a list of moves, for each hop and a codec's work around it; a lane performs every stage of its
collectives side by side.

While the second hop of one collective crosses nodes, the first hop of the next can already run inside the node: the
stages of a lane are queues of their own, and only the moves of one collective wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from thinwire.program import Stage

__all__ = ["Move", "Moves"]


@dataclass(frozen=True, slots=True)
class Move:
    """One part of one collective: a hop with what belongs to it (packing, adding up), or a codec's work.

    Attributes:
        stage: the queue that performs it.
        body: the work, for the thread or stream of that queue. Whoever performs it keeps it until the device is done
            with it, and with it all memory that it refers to.
    """

    stage: Stage
    body: Callable[[], None]


class Moves(tuple[Move, ...]):
    """The moves of one collective, in order; each needs the one before."""

    __slots__ = ()

    def perform(self) -> None:
        """Perform all moves here and now."""
        for move in self:
            move.body()

    def after(self, prepare: Callable[[], None]) -> Moves:
        """These moves, the first of which begins with ``prepare``; where there are none, that alone."""
        if not self:
            return Moves([Move(Stage.GATHER_INSIDE, prepare)])
        first, *rest = self
        return Moves([Move(first.stage, _one_by_one(prepare, first.body)), *rest])

    def then(self, finish: Callable[[], None]) -> Moves:
        """These moves, the last of which ends with ``finish``."""
        *rest, last = self
        return Moves([*rest, Move(last.stage, _one_by_one(last.body, finish))])


def _one_by_one(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def body() -> None:
        first()
        second()

    return body
