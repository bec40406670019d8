"""Bounds the time that a rank waits for the job's store."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

STORE_PATIENCE = 3.0
"""Seconds that the job's store may take to answer."""

Answer = TypeVar("Answer")


def within_patience(ask: Callable[[], Answer], seconds: float | None = None) -> Answer | None:
    """Ask the store, and return ``None`` after some seconds, :data:`STORE_PATIENCE` by default, or if it is gone.

    A store whose host is cut off does not refuse the connection: without this bound, its client would wait as long as
    TCP retries.
    """
    answers: list[Answer] = []

    def keep_answer() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(ask())

    asking = threading.Thread(target=keep_answer, daemon=True)
    asking.start()
    asking.join(STORE_PATIENCE if seconds is None else seconds)
    return answers[0] if answers else None
