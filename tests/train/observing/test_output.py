"""A run's output, which may go away before the run does."""

from __future__ import annotations

import os
import sys

import pytest

from thinwire.train.observing.progress import run_console


@pytest.mark.parametrize("place", ["a pipe that nobody reads", "/dev/full"])
def test_what_cannot_be_written_is_left_out(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if place == "/dev/full":
        writing = os.open(place, os.O_WRONLY)
    else:
        reading, writing = os.pipe()
        os.close(reading)
    with os.fdopen(writing, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        console = run_console()
        for line in range(1000):
            console.print(f"step {line}")
    (said,) = caplog.messages
    assert said.startswith("the output cannot be written: ")
