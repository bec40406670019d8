"""Output of a run on a terminal, pipe or file, which may go away before the run ends."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import IO, Any, cast

from rich.console import Console

log = logging.getLogger("thinwire")


def run_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that prints text as it is: ``runs/[a]`` is a path and no markup. Once its stream cannot be written, it
    prints nothing more, and the run goes on."""
    stream = _Lasting(sys.stderr if stderr else sys.stdout)
    return Console(file=cast("IO[str]", stream), quiet=quiet, highlight=False, markup=False)


class _Lasting:
    """A stream that outlives its reader: Ctrl-C also ends ``tee``, a terminal is closed, a disk is full."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self, error: OSError) -> None:
        """Send to the null device what the stream still holds, and whatever else this process writes there."""
        with contextlib.suppress(OSError):  # a stream of Python's own has no descriptor
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        log.warning("the output cannot be written: %s; the run goes on without it", error.strerror)
