"""Moves: hops in order, with additional work before the first and after the last."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.collectives.moves import Move, Moves
from thinwire.program.stages import Stage


def noting(notes: list[str], text: str) -> Callable[[], None]:
    return lambda: notes.append(text)


def test_moves_run_in_order_between_preparation_and_finish() -> None:
    notes: list[str] = []
    moves = Moves([Move(Stage.SCATTER_INSIDE, noting(notes, "in")), Move(Stage.SCATTER_ACROSS, noting(notes, "x"))])
    around = moves.after(noting(notes, "pack")).then(noting(notes, "unpack"))
    around.perform()
    assert notes == ["pack", "in", "x", "unpack"]
    assert [move.stage for move in around] == [move.stage for move in moves]
    notes.clear()
    Moves(moves[:1]).after(noting(notes, "pack")).then(noting(notes, "unpack")).perform()
    assert notes == ["pack", "in", "unpack"], "one move is first and last"


def test_where_nothing_is_exchanged_the_preparation_is_all() -> None:
    notes: list[str] = []
    Moves().perform()
    Moves().after(noting(notes, "pack")).perform()
    assert notes == ["pack"]
