"""Collections stop in a block, and only there."""

from __future__ import annotations

import gc

import pytest

from thinwire.garbage import uncollected


@uncollected()
def _collects() -> bool:
    return gc.isenabled()


def test_collections_go_on_afterwards() -> None:
    assert not _collects()
    assert gc.isenabled()


def test_collections_go_on_after_an_error() -> None:
    with pytest.raises(ValueError, match="within"), uncollected():
        raise ValueError("within")
    assert gc.isenabled()


def test_a_user_who_collects_none_stays_without() -> None:
    gc.disable()
    try:
        _collects()
        assert not gc.isenabled()
    finally:
        gc.enable()
