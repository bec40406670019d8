"""Which cases of a product of parameters the default suite runs: every value of every parameter is among them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from tests.conftest import repeated

from thinwire.codecs.cpp import _native

WORDS, NUMBERS = ("one", "two", "three"), ((1,), (2,))


class Case:
    """As much of a collected case as the selection reads."""

    def __init__(self, **params: object) -> None:
        self.callspec = SimpleNamespace(params=params)


def kept(cases: list[Any]) -> list[dict[str, Any]]:
    left_out = set(repeated(cases))
    return [case.callspec.params for case in cases if case not in left_out]


def test_every_value_is_kept() -> None:
    found = kept([Case(word=word, number=number) for word, number in itertools.product(WORDS, NUMBERS)])
    assert {params["word"] for params in found} == set(WORDS)
    assert {params["number"] for params in found} == set(NUMBERS)
    assert len(found) == len(WORDS)


def test_values_that_come_together_are_kept_together() -> None:
    assert len(kept([Case(word=word, length=len(word)) for word in WORDS])) == len(WORDS)


def test_the_own_instruction_set_has_every_case() -> None:
    targets = _native.targets()
    found = kept([Case(word=word, target=target) for word, target in itertools.product(WORDS, targets)])
    assert {params["word"] for params in found if params["target"] == _native.target()} == set(WORDS)
    assert {params["target"] for params in found} == set(targets)
