"""Measures how much computation is delayed by each second of processor time that its rank uses for something else.

Where processors compute, they also send: the kernel and the transport copy every byte, and nothing hides that work. A
thread that does nothing but copy shows its cost. That is zero if a core is free for the thread. It is several seconds
per second if ranks share cores and caches, and every rank has such a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator

import torch

from thinwire.collectives.group import Control
from thinwire.profile.timing import Call, clocked

TURNS = 8
"""Number of turns. All of them count, because other work on the machine may slow down either part of a turn."""

_BYTES = 1 << 21
"""Bytes that the thread copies at once, about as many as a part of a bucket in flight."""


def measure_crowding(compute: Call, control: Control, device: torch.device, turn: float = 0.2) -> float:
    """Time computation alone, and next to a thread of its rank that uses the processor, in turn, on all ranks at once.

    A ``turn`` has about so many seconds of computation alone.

    Returns:
        Seconds by which computation is delayed for each second of processor time of that thread; the same on every
        rank. It is 0 on an accelerator, which no thread of its host delays.
    """
    if device.type != "cpu":
        return 0.0
    compute()
    once = control.all_reduce_mean(clocked(control, compute, 1, device)[:1])[0]
    calls = max(1, round(turn / once))
    held_up = seconds = 0.0
    before, _ = clocked(control, compute, calls, device)
    for _ in range(TURNS):
        with _spinning() as spun:
            beside, _ = clocked(control, compute, calls, device)
        # Other work changes the pace of the machine, so computation alone is timed right before and right after.
        after, _ = clocked(control, compute, calls, device)
        alone, together, used = control.all_reduce_mean([(before + after) / 2, beside, *spun])
        held_up += calls * (together - alone)
        seconds += used
        before = after
    return max(0.0, held_up / seconds)


@contextlib.contextmanager
def _spinning() -> Iterator[list[float]]:
    """Context in which a thread only uses the processor. It fills the list with its seconds in the end."""
    seconds: list[float] = []
    over = threading.Event()

    def spin() -> None:
        source, target = (ctypes.create_string_buffer(_BYTES) for _ in range(2))
        begin = time.thread_time()
        while not over.is_set():
            ctypes.memmove(target, source, _BYTES)  # releases the interpreter's lock
        seconds.append(time.thread_time() - begin)

    thread = threading.Thread(target=spin, name="thinwire-profile-spinner")
    thread.start()
    try:
        yield seconds
    finally:
        over.set()
        thread.join()
