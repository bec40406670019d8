"""Tensors are found and replaced wherever torch takes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from thinwire.sharding.tensors.arguments import replaced, tensors_among

PARAMETER, PLAIN, OTHER = nn.Parameter(torch.ones(2)), torch.zeros(2), torch.full((2,), 7.0)


class Rows(list[Any]):
    """What pytrees take for a leaf."""


class Pair(NamedTuple):
    first: Any
    second: Any


class Sized(tuple[Any, ...]):
    """Made from something else than its items."""

    def __new__(cls, count: int) -> Sized:
        return super().__new__(cls, range(count))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((PARAMETER, 1), (OTHER, 1)),
        ([PLAIN, [PARAMETER]], [PLAIN, [OTHER]]),
        (Rows([PARAMETER, PLAIN]), Rows([OTHER, PLAIN])),
        (Pair(PLAIN, Rows([(PARAMETER,)])), Pair(PLAIN, Rows([(OTHER,)]))),
        ({"a": Rows([{"b": PARAMETER}])}, {"a": Rows([{"b": OTHER}])}),
    ],
)
def test_they_are_replaced(arguments: Any, expected: Any) -> None:
    got = replaced(nn.Parameter, lambda _: OTHER, arguments)
    assert type(got) is type(expected)
    assert [*map(id, tensors_among(got))] == [*map(id, tensors_among(expected))]


def test_what_holds_none_is_not_made_anew() -> None:
    sized, rows = Sized(3), Rows([PLAIN])
    got = replaced(nn.Parameter, lambda _: OTHER, (sized, rows))
    assert got[0] is sized
    assert got[1] is rows
