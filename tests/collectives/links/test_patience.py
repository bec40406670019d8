"""A failing rank asks the others for the cause, but only briefly if none answers."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from thinwire.collectives.job import failures
from thinwire.collectives.job.rollcall import RollCall
from thinwire.collectives.links import patience


class CutOff:
    """A store whose host does not answer."""

    def __init__(self) -> None:
        self.back = threading.Event()

    def set(self, key: str, value: str) -> None:
        """Bytes that TCP accepts and cannot deliver."""

    def check(self, keys: list[str]) -> bool:
        """Wait for an answer."""
        self.back.wait(30)
        raise RuntimeError("gone")


def test_a_store_that_does_not_answer_does_not_hold_a_failure_up(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = CutOff()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(patience, "STORE_PATIENCE", 0.1)
    started = time.monotonic()
    assert "The store has not answered" in failures._publish_and_ask("failed in all_gather", [0, 2])
    assert time.monotonic() - started < 10
    store.back.set()
    monkeypatch.setattr(patience, "STORE_PATIENCE", 20.0)
    assert "The store is gone too" in failures._publish_and_ask("failed in all_gather", [0, 2])


def test_a_store_that_does_not_answer_does_not_hold_the_roll_call_up(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = CutOff()
    monkeypatch.setattr(patience, "STORE_PATIENCE", 0.1)
    rollcall = RollCall(lambda: None, lambda: store)
    rollcall._asking = True
    started = time.monotonic()
    assert rollcall.find_verdict() == ""
    assert time.monotonic() - started < 10
    store.back.set()
