"""Moves: hops in order, with additional work before the first and after the last."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.collectives.moves import Move, Moves
from thinwire.program import Scope
from thinwire.program.stages import TRANSFERS, Stage


def noting(notes: list[str], text: str) -> Callable[[], None]:
    return lambda: notes.append(text)


def test_moves_run_in_order_between_preparation_and_finish() -> None:
    notes: list[str] = []
    moves = Moves([Move(Stage.SCATTER_INSIDE, noting(notes, "in")), Move(Stage.SCATTER_ACROSS, noting(notes, "x"))])
    around = moves.after(noting(notes, "pack")).then(noting(notes, "unpack"))
    around.perform()
    assert notes == ["pack", "in", "x", "unpack"]
    assert [move.stage for move in around] == [move.stage for move in moves]


def test_one_move_is_first_and_last() -> None:
    notes: list[str] = []
    move = Move(Stage.GATHER_ACROSS, noting(notes, "x"))
    Moves([move]).after(noting(notes, "pack")).then(noting(notes, "unpack")).perform()
    assert notes == ["pack", "x", "unpack"]


def test_where_nothing_is_exchanged_the_preparation_is_all() -> None:
    notes: list[str] = []
    Moves().perform()
    Moves().after(noting(notes, "pack")).perform()
    assert notes == ["pack"]


def test_stages_know_how_far_they_go() -> None:
    assert {stage: stage.scope for stage in TRANSFERS} == {
        Stage.SCATTER_INSIDE: Scope.INSIDE,
        Stage.SCATTER_ACROSS: Scope.ACROSS,
        Stage.GATHER_ACROSS: Scope.ACROSS,
        Stage.GATHER_INSIDE: Scope.INSIDE,
    }
