"""Batches that are made a step ahead: always those that were asked for, and every wait is counted."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from thinwire.errors import DataError
from thinwire.train.data.samples import Batch, BatchesAhead, Duration


def batches(position: int) -> list[Batch]:
    return [Batch(torch.tensor([position]), torch.tensor([position + 1]))]


def position_of(made: list[Batch]) -> int:
    return int(made[0].input_ids)


def test_a_step_that_finds_its_batches_does_not_wait() -> None:
    ahead = BatchesAhead(batches)
    ahead.prepare(0)
    for step in range(5):
        time.sleep(0.05)
        assert position_of(ahead.take(8 * step, 8 * step + 8)) == 8 * step
    assert ahead.take_waits() == Duration()


def test_waits_are_counted_until_they_are_taken() -> None:
    ready = threading.Event()

    def slowly(position: int) -> list[Batch]:
        assert ready.wait(10)
        return batches(position)

    ahead = BatchesAhead(slowly)
    threading.Timer(0.2, ready.set).start()
    assert position_of(ahead.take(0, 8)) == 0
    waits = ahead.take_waits()
    assert waits.steps == 1
    assert 0.1 < waits.seconds < 5
    assert ahead.take_waits() == Duration()


def test_a_run_that_continues_elsewhere_gets_its_own_batches() -> None:
    ahead = BatchesAhead(batches)
    ahead.prepare(0)
    assert position_of(ahead.take(40, 48)) == 40
    assert position_of(ahead.take(48, 56)) == 48


def test_an_error_ends_the_step_whose_batches_cannot_be_made() -> None:
    def refuses(position: int) -> list[Batch]:
        if position == 8:
            raise DataError("no such token")
        return batches(position)

    ahead = BatchesAhead(refuses)
    assert position_of(ahead.take(0, 8)) == 0
    with pytest.raises(DataError, match="no such token"):
        ahead.take(8, 16)
