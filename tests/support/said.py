"""What thinwire's log says on a rank, where pytest captures nothing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def heard(level: int = logging.INFO) -> Iterator[list[str]]:
    """Messages of the log from a level on, as they come."""
    said: list[str] = []
    log, handler = logging.getLogger("thinwire"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    before = log.level
    log.setLevel(level)
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
