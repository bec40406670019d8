"""Questions to the store that may never be answered."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["STORE_PATIENCE", "within_patience"]

STORE_PATIENCE = 3.0
"""Seconds that the job's store may take to answer."""

Answer = TypeVar("Answer")


def within_patience(ask: Callable[[], Answer]) -> Answer | None:
    """What a question to the store gives, or ``None`` after :data:`STORE_PATIENCE` or if the store is gone.

    A store whose host is cut off answers neither yes nor no: its client would wait for as long as TCP tries.
    """
    answers: list[Answer] = []

    def keep_answer() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(ask())

    asking = threading.Thread(target=keep_answer, daemon=True)
    asking.start()
    asking.join(STORE_PATIENCE)
    return answers[0] if answers else None
