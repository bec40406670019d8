"""Requests to save and leave: Ctrl-C, SIGTERM, a stop file.

A rank only *notices* a request here; the step's control exchange makes all ranks agree on it. The second
signal falls through to the default action and kills.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from types import FrameType
from typing import Final, Self

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Notices that someone wants the run to end after the current step.

    Args:
        file: a request exists while this file does. Our launcher makes it: its ranks live in sessions of
            their own, where the terminal's Ctrl-C does not reach them.
        launched: whether our launcher started this process. It then asks through the file, and SIGTERM keeps
            its default action, so that the ranks that survive a lost one leave at once.
    """

    def __init__(self, file: Path, *, launched: bool) -> None:
        self._file = file
        self._parent = os.getppid() if launched else None
        self._signal: int | None = None
        self._previous: dict[int, signal.Handlers | object] = {}

    def __enter__(self) -> Self:
        if self._parent is None:
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def reason(self) -> str | None:
        """Why this rank wants to stop; None while it does not."""
        if self._signal is not None:
            return signal.Signals(self._signal).name
        if self._parent is not None and os.getppid() != self._parent:
            return "the launcher is gone"
        with contextlib.suppress(OSError):
            return self._file.read_text().strip() or "stop file"
        return None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_DFL)
