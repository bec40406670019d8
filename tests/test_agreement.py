"""What ranks tell each other: values of a stated type, and an error on one rank, which is raised on all."""

from __future__ import annotations

import contextlib
import math
import pickle
import random
from dataclasses import dataclass
from typing import Any, cast

import pytest

from thinwire.agreement import NOTHING, Typed, agree
from thinwire.collectives.group import control
from thinwire.errors import CheckpointError, CollectiveError, MismatchError
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
        values = ranks.agree(
            action, lambda problems: MismatchError(f"{dict(problems)}"), Typed[int](int), raises_own=raises_own
        )
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

    def all_gather_bytes(self, message: bytes, /) -> list[bytes]:
        self.told = message
        return [message]


def test_an_interrupt_is_announced_and_stays_one() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    ranks = _One()
    with pytest.raises(KeyboardInterrupt):
        agree(ranks, interrupted, lambda problems: CheckpointError(str(problems)), NOTHING)
    assert ranks.told == b'[["KeyboardInterrupt: ",null]]'


@dataclass(frozen=True)
class _Entry:
    name: str
    seconds: float
    spans: list[tuple[int, int]]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (float, math.inf),
        (list[float], [0.1, 5e-324, -math.inf]),
        (bytes, b"\x00\xff"),
        (str | None, None),
        (None, None),
        (tuple[str, bool, dict[str, tuple[int, int]]], ("a", True, {"b": (1, 2)})),
        (set[str], {"a", "b"}),
        (list[_Entry], [_Entry("a", math.nan, [(0, 2**62)])]),
        (object, {"a": [1, 2.5, None, "b"]}),
    ],
)
def test_a_value_arrives_as_it_was(kind: Any, value: Any) -> None:
    typed: Typed[Any] = Typed(kind)
    got = typed.decode(typed.encode(value))
    assert type(got) is type(value)
    assert got == value or repr(got) == repr(value)  # no number equals NaN


@pytest.mark.parametrize(("kind", "value"), [(int, "1"), (list[float], [None]), (_Entry, {"name": "a"})])
def test_another_value_is_not_sent(kind: Any, value: Any) -> None:
    with pytest.raises(TypeError, match="not a value of"):
        Typed[Any](kind).encode(value)


def test_a_result_of_another_type_is_everyones_error() -> None:
    with pytest.raises(CheckpointError, match="not a value of"):
        agree(_One(), lambda: cast("int", "one"), lambda problems: CheckpointError(str(problems)), Typed[int](int))


def test_no_message_is_more_than_a_value_or_an_error() -> None:
    """Messages of a stranger: cut, with bits flipped, of other types, pickles."""
    typed: Typed[list[_Entry]] = Typed(list[_Entry])
    good = typed.encode([_Entry("a", 1.5, [(1, 2), (3, 4)])])
    chance = random.Random(0)
    messages = [b"", b"null", b"[1]", b"[" * 100_000, pickle.dumps(OSError), *(good[:end] for end in range(len(good)))]
    for _ in range(2_000):
        changed = bytearray(good)
        changed[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
        messages.append(bytes(changed))
    for message in messages:
        value: list[_Entry] = []
        with contextlib.suppress(CollectiveError):
            value = typed.decode(message)
        assert all(type(entry) is _Entry for entry in value)
        assert all(type(number) is int for entry in value for span in entry.spans for number in span)
