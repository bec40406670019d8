"""What tests of the native codecs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from thinwire.codecs.cpp import _native


@pytest.fixture(params=_native.targets())
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set of this machine, in use while the test runs."""
    before = _native.target()
    _native.use_target(request.param)
    yield request.param
    _native.use_target(before)
