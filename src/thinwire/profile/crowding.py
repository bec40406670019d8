"""How much computation is held up by each second of processor that its rank uses for something else.

Where processors compute, they also send: the kernel and the transport copy every byte. That work is hidden behind
nothing. A thread that only copies tells what it costs: nothing where a core is free for it, and several seconds for one
where ranks share cores and caches and every rank has such a thread.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import torch

from thinwire.collectives.group import Control

__all__ = ["measure_crowding"]

TURNS = 8
"""Turns, all of which count: what a machine does besides holds up one or the other of two neighbours."""

_BYTES = 1 << 21
"""That the thread copies at once, about as many as a bucket's part on its way."""


def measure_crowding(compute: Callable[[], None], control: Control, device: torch.device, turn: float = 0.2) -> float:
    """Computation alone and beside a thread of its rank that uses the processor, in turn, on all ranks at once.

    Args:
        compute: the computation, once.
        control: joins all ranks.
        device: where it computes.
        turn: seconds of computation alone in a turn, about.

    Returns:
        Seconds by which computation is held up for each second of that thread's, the same on every rank; 0 on an
        accelerator, which no thread of its host holds up.
    """
    if device.type != "cpu":
        return 0.0
    compute()
    once = control.all_reduce_mean([_computing(compute, control, 1)])[0]
    calls = max(1, round(turn / once))
    held_up = seconds = 0.0
    before = _computing(compute, control, calls)
    for _ in range(TURNS):
        spinner = _Spinner()
        with spinner:
            beside = _computing(compute, control, calls)
        # What else the machine does changes its pace: computation alone is taken right before and right after.
        after = _computing(compute, control, calls)
        alone, together, used = control.all_reduce_mean([(before + after) / 2, beside, spinner.seconds])
        held_up += together - alone
        seconds += used
        before = after
    return max(0.0, held_up / seconds)


def _computing(compute: Callable[[], None], control: Control, calls: int) -> float:
    """Seconds of so many computations of this rank, all ranks at it at once."""
    control.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        compute()
    return time.perf_counter() - begin


class _Spinner:
    """A thread that uses the processor and nothing else, while its context lasts.

    Attributes:
        seconds: of processor that it used.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._spin, name="thinwire-profile-spinner")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _spin(self) -> None:
        source, target = (ctypes.create_string_buffer(_BYTES) for _ in range(2))
        begin = time.thread_time()
        while not self._over.is_set():
            ctypes.memmove(target, source, _BYTES)  # without the interpreter's lock
        self.seconds = time.thread_time() - begin
