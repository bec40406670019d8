"""Vector clocks of simulated streams."""

from __future__ import annotations

import sys
import threading

from thinwire.testing.simulated import Clock, merge


def test_a_clock_is_merged_while_another_thread_adds_to_it() -> None:
    growing: Clock = {}
    ended = threading.Event()

    def grow() -> None:
        while not ended.is_set():
            growing.clear()
            for stream in range(5000):
                growing[stream] = stream

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can
    thread = threading.Thread(target=grow)
    thread.start()
    try:
        for _ in range(2000):
            merged: Clock = {}
            merge(merged, growing)
            assert all(stream == position for stream, position in merged.items())
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)
