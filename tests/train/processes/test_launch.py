"""Signals that a launcher answers."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from thinwire.train.directory import RunDirectory
from thinwire.train.processes.launch import _EndedBySignalError, _stop_on_signal


@pytest.mark.parametrize("with_nohup", [False, True])
def test_a_closed_terminal_ends_what_nohup_has_not_started(tmp_path: Path, with_nohup: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if with_nohup else signal.SIG_DFL)
    ended = False
    try:
        with _stop_on_signal(RunDirectory(tmp_path), print):
            signal.raise_signal(signal.SIGHUP)
    except _EndedBySignalError:
        ended = True
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended is not with_nohup
