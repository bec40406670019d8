"""A pool of ranks after a call that did not end as it should."""

from __future__ import annotations

import contextlib
import signal
import time

import pytest

from thinwire.testing import RankPool

pytestmark = pytest.mark.ranks


def slow() -> str:
    time.sleep(0.5)
    return "of the first call"


def quick() -> str:
    return "of the second call"


def interrupt(*_: object) -> None:
    raise TimeoutError


def test_an_interrupted_call_leaves_no_answer_for_the_next() -> None:
    """As where a test's own timeout ends it."""
    with contextlib.closing(RankPool(2)) as pool:
        pool.run(quick)
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            with pytest.raises(TimeoutError):
                pool.run(slow)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert pool.run(quick) == ["of the second call"] * 2
