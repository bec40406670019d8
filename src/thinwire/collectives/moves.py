"""A collective is a list of moves, for each hop and a codec's work around it; a lane performs every stage of its
collectives side by side.

While the second hop of one collective crosses nodes, the first hop of the next can already run inside the node: the
stages of a lane are queues of their own, and only the moves of one collective wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from thinwire.program import Stage


@dataclass(frozen=True, slots=True)
class Move:
    """One part of a collective: a hop with its packing and addition, or the work of a codec.

    Attributes:
        stage: Queue that performs the move.
        body: The work, for the thread or stream of that queue. The queue keeps the body, and with it all memory that it
            refers to, until the device has finished.
    """

    stage: Stage
    body: Callable[[], None]


class Moves(tuple[Move, ...]):
    """The moves of one collective in order; each needs the previous one."""

    __slots__ = ()

    def perform(self) -> None:
        for move in self:
            move.body()

    def between(self, encode: Callable[[], None], decode: Callable[[], None]) -> Moves:
        """These hops of a gather between the work of its codec."""
        return Moves([Move(Stage.ENCODE_GATHER, encode), *self, Move(Stage.DECODE_GATHER, decode)])

    def after(self, prepare: Callable[[], None]) -> Moves:
        """These moves, with ``prepare`` at the beginning of the first; ``prepare`` alone if there are none."""
        if not self:
            return Moves([Move(Stage.GATHER_INSIDE, prepare)])
        first, *rest = self
        return Moves([Move(first.stage, _one_by_one(prepare, first.body)), *rest])

    def then(self, finish: Callable[[], None]) -> Moves:
        """These moves, with ``finish`` at the end of the last."""
        *rest, last = self
        return Moves([*rest, Move(last.stage, _one_by_one(last.body, finish))])


def _one_by_one(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def body() -> None:
        first()
        second()

    return body
