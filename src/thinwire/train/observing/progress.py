"""The progress of a run: a bar on a terminal, or occasional lines in a file or pipe."""

from __future__ import annotations

import time
from typing import Final, Literal, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from thinwire.train.observing.metrics import StepRecord
from thinwire.train.observing.output import run_console
from thinwire.units import format_duration

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
