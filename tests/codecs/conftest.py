"""What tests of the native codecs share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from thinwire.codecs.cpp import _native
from thinwire.spec.codec_plugin import forget_plugins


@pytest.fixture(params=_native.targets())
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set of this machine, in use while the test runs."""
    before = _native.target()
    _native.use_target(request.param)
    yield request.param
    _native.use_target(before)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Numbers of threads that work on a message."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


PLANTED = Path(__file__).with_name("planted")


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The codecs of ``planted/`` are installed, in this process and in those that it starts."""
    monkeypatch.syspath_prepend(str(PLANTED))
    monkeypatch.setenv("PYTHONPATH", str(PLANTED), prepend=os.pathsep)
    forget_plugins()
    yield
    forget_plugins()
