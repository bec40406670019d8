"""Every behaviour of the catalogue gives the result of one process, or is refused with the expected sentence."""

from __future__ import annotations

import inspect
import re

import pytest
from tests.behaviours import page
from tests.behaviours.catalog import Behaviour, catalogue
from tests.behaviours.context import PRESETS
from tests.behaviours.not_yet import NOT_YET
from tests.behaviours.runner import Outcome, run

DEFAULT = "zero3"
"""Preset of the default suite, on two ranks."""

USUAL = [name for name, one in catalogue().items() if not one.slow][::4]
"""Behaviours of the default suite: every fourth one that is fast, so that each kind has some."""


def verdict(one: Behaviour, preset: str, world: int, outcome: Outcome) -> str:
    """The difference between an outcome and the expected one; empty if there is none."""
    kind, text = outcome
    sentence = one.refusal(preset)
    refused = sentence is not None and kind == "refused" and re.search(sentence, text) is not None
    good = refused or (sentence is None and kind == "equal")
    where = f"{one.name} under {preset} on {world} ranks"
    listed = NOT_YET.get(one.name, {}).get(preset)
    if listed is None:
        return "" if good else f"{where}: {kind}: {text}; expected {sentence or 'what one process gives'}"
    if good:
        return f"{where} is as it should be: remove it from not_yet.py"
    return "" if kind == listed else f"{where}: {kind}: {text}; not_yet.py lists it as {listed}"


def check(preset: str, world: int, names: list[str]) -> None:
    """Run behaviours and compare outcomes with what is expected."""
    entries = catalogue()
    problems = [verdict(entries[name], preset, world, outcome) for name, outcome in run(names, preset, world).items()]
    assert not any(problems), "\n".join(problem for problem in problems if problem)


@pytest.mark.slow
@pytest.mark.timeout(560)
def test_usual_behaviours_on_two_ranks() -> None:
    check(DEFAULT, 2, USUAL)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_behaviour_under_every_plan(preset: str, world: int) -> None:
    if preset == DEFAULT and world == 2:
        check(preset, world, [name for name in catalogue() if name not in USUAL])
    else:
        check(preset, world, list(catalogue()))


def test_the_catalogue_is_as_large_as_promised() -> None:
    entries = catalogue()
    assert len(entries) >= 130
    assert set(NOT_YET) <= set(entries)
    for preset in {preset for presets in NOT_YET.values() for preset in presets}:
        assert preset in PRESETS


@pytest.mark.parametrize("source", ["FSDP2", "DeepSpeed", "DDP"])
def test_behaviours_come_from_the_suites_of_others(source: str) -> None:
    assert sum(one.origin.startswith(source) for one in catalogue().values()) >= 10


def test_the_page_is_what_the_catalogue_says() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.render(), "run: python -m tests.behaviours.page"


def test_few_ordinary_programs_are_refused() -> None:
    refused = [one for one in catalogue().values() if one.refused]
    assert page.sentences([one for one in refused if one.kind == "ordinary"]) <= 15
    for one in refused:
        if one.kind == "unlike ranks":  # not only by its subject
            assert "rank" in inspect.getsource(one.function).replace("_on_rank_0", ""), one.name


def test_every_unexpected_outcome_is_reported() -> None:
    one = catalogue()["plain_loop"]
    assert verdict(one, "zero3", 2, ("equal", "")) == ""
    for kind in ("wrong", "crashed", "hung", "refused"):
        assert "plain_loop under zero3" in verdict(one, "zero3", 2, (kind, "text"))
    refused = catalogue()["model_sharded_twice"]
    assert verdict(refused, "zero3", 2, ("refused", "Stack is sharded already")) == ""
    assert verdict(refused, "zero3", 2, ("refused", "another sentence"))
    assert verdict(refused, "zero3", 2, ("equal", ""))
