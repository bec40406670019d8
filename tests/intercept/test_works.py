"""Works of intercepted operations: every way of waiting for one returns once it has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from thinwire.intercept.works import AllOf, Courier, Promise, Stopwatch, Watched
from thinwire.testing import check_streams

SLOW = 0.1


def ended_later() -> tuple[Promise, torch.Tensor]:
    """Work that ends after a while, and what it fills."""
    tensor = torch.zeros(1)
    promise = Promise([tensor])

    def run() -> None:
        time.sleep(SLOW)
        tensor.fill_(1.0)
        promise.end()

    threading.Thread(target=run).start()
    return promise, tensor


WORKS: dict[str, Callable[[Promise], Promise | Watched]] = {
    "itself": lambda promise: promise,
    "with others": lambda promise: AllOf([promise]),
    "watched": lambda promise: Watched(promise, Stopwatch()),
}


@pytest.mark.parametrize("way", ["wait", "synchronize"])
@pytest.mark.parametrize("kind", WORKS)
def test_whoever_waits_sees_the_result(kind: str, way: str) -> None:
    promise, tensor = ended_later()
    work = WORKS[kind](promise)
    assert not work.is_completed()
    getattr(work, way)()
    assert float(tensor) == 1.0
    assert work.is_completed()


def test_a_reading_waits_for_streams_that_still_wait() -> None:
    with check_streams("never") as check:
        watch, tensor = Stopwatch(), torch.zeros(1)
        with watch.running(check.streams):
            tensor.add_(1)
        ended = check.streams.event()
        ended.record(check.streams.current())
        assert not ended.query()
        watch.read(reset=True)
        assert ended.query()


def test_a_courier_returns_when_all_earlier_tasks_have_ended() -> None:
    courier, order = Courier("test"), list[str]()
    first, second = Promise([]), Promise([])

    def slow() -> None:
        time.sleep(SLOW)
        order.append("first")

    courier.perform(slow, first, wait=False)
    courier.perform(lambda: order.append("second"), second, wait=True)
    assert order == ["first", "second"]
    assert first.is_success()
    assert second.is_success()
    courier.close()


def test_a_closed_courier_has_done_its_tasks() -> None:
    courier, promise = Courier("test"), Promise([])
    courier.perform(lambda: time.sleep(SLOW), promise, wait=False)
    courier.close()
    assert promise.is_success()
