"""Agreement between ranks: an error on one rank is raised on all, and exceptions are never pickled."""

from __future__ import annotations

import pytest

from thinwire.agreement import agree
from thinwire.collectives.group import control
from thinwire.errors import CheckpointError, MismatchError
from thinwire.testing import run_ranks


class _Unpicklable(ValueError):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first, second)

    def __str__(self) -> str:
        return "two arguments"


def _acts(failing: int, raises_own: bool) -> str:
    ranks = control()

    def action() -> int:
        if ranks.rank == failing:
            raise _Unpicklable("a", "b")
        return ranks.rank

    try:
        values = ranks.agree(action, lambda problems: MismatchError(f"{dict(problems)}"), raises_own=raises_own)
    except Exception as error:
        return f"{type(error).__name__}: {error}; cause {type(error.__cause__).__name__}"
    return str(values)


def test_results_of_all_ranks_arrive() -> None:
    assert run_ranks(2, _acts, -1, False) == ["[0, 1]", "[0, 1]"]


def test_one_rank_s_error_is_everyone_s() -> None:
    text = "MismatchError: {1: '_Unpicklable: two arguments'}"
    assert run_ranks(2, _acts, 1, False) == [f"{text}; cause NoneType", f"{text}; cause _Unpicklable"]


def test_a_rank_may_keep_its_own_error() -> None:
    first, second = run_ranks(2, _acts, 1, True)
    assert first == "MismatchError: {1: '_Unpicklable: two arguments'}; cause NoneType"
    assert second == "_Unpicklable: two arguments; cause NoneType"


class _One:
    rank, size = 0, 1

    def all_gather_object(self, obj: object, /) -> list[object]:
        self.told = obj
        return [obj]


def test_an_interrupt_is_announced_and_stays_one() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    ranks = _One()
    with pytest.raises(KeyboardInterrupt):
        agree(ranks, interrupted, lambda problems: CheckpointError(str(problems)))
    assert ranks.told == ("KeyboardInterrupt: ", None)
