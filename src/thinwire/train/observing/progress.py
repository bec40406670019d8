"""The progress of a run: a bar on a terminal, or occasional lines in a file or pipe, which may go away before the run
ends."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from typing import IO, Any, Final, Literal, Self, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from thinwire.train.observing.metrics import StepRecord
from thinwire.units import format_duration

log = logging.getLogger("thinwire")

Stream = Literal["stdout", "stderr", "none"]

_NUM_LINES: Final = 25
_SMOOTHING: Final = 0.9


class ProgressReport:
    """Shows loss, tokens per second and the remaining time; on ranks other than rank 0, the stream is ``none``."""

    def __init__(self, steps: int, start: int, stream: Stream) -> None:
        self._steps = steps
        self._every = max(1, (steps - start) // _NUM_LINES)
        self._due = start + 1  # not every step is logged: the next one at or after it is shown
        self._silent = stream == "none"
        self._console = run_console(stderr=stream == "stderr")
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._started = time.monotonic()
        self._start = start
        self._speed: float | None = None
        self._val_loss: float | None = None
        if not self._silent and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=steps, completed=start, status="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """Print a line of text above the bar."""
        if not self._silent:
            self._console.print(text, soft_wrap=True)

    def step(self, record: StepRecord) -> None:
        if self._silent:
            return
        now = record.tokens_per_second
        self._speed = now if self._speed is None else _SMOOTHING * self._speed + (1 - _SMOOTHING) * now
        self._val_loss = self._val_loss if record.val_loss is None else record.val_loss
        status = self._status(record)
        if self._bar is not None:
            self._bar.update(self._task, completed=record.step, status=status)
        elif record.step >= self._due or record.step == self._steps:
            self._due = (record.step // self._every + 1) * self._every
            self.note(f"step {record.step}/{self._steps}  {status}")

    def _status(self, record: StepRecord) -> str:
        done = record.step - self._start
        left = (time.monotonic() - self._started) / done * (self._steps - record.step)
        parts = [f"loss {record.loss:.3f}"]
        if record.loss_scale is not None:
            parts.append(f"scale {record.loss_scale:g}")
        if record.skipped_steps:
            parts.append(f"{record.skipped_steps} skipped")
        if self._val_loss is not None:
            parts.append(f"val {self._val_loss:.3f}")
        parts.append(f"{self._speed:,.0f} tokens/s")
        parts.append(f"ETA {format_duration(round(left))}")
        return "  ".join(parts)


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
