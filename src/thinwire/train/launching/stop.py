"""Requests to save and exit: Ctrl-C, SIGTERM, or a stop file.

A rank only *notices* a request; all ranks agree on it in the step's control exchange. A second signal has its default
action and kills the process.
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
    """Notices requests to end the run after the current step.

    Args:
        file: Stop file; while it exists, the run should stop. Our launcher creates it because its ranks run in sessions
            of their own, which the terminal's Ctrl-C does not reach.
        launched: Whether our launcher started this process. The launcher requests a stop through the file. SIGTERM
            keeps its default action, so that the survivors of a lost rank exit at once.
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
        """Reason to stop; ``None`` if there is no request."""
        if self._signal is not None:
            return signal.Signals(self._signal).name
        if self._parent is not None and os.getppid() != self._parent:
            return "the launcher is gone"
        with contextlib.suppress(OSError):
            return self._file.read_text(encoding="utf-8").strip() or "stop file"
        return None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_DFL)
