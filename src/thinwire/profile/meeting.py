"""How computation and transfers slow each other down when a lane sends while a block computes (gamma)."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from thinwire.collectives.group import Control
from thinwire.profile.timing import finish
from thinwire.program import Scope
from thinwire.spec.profile import OverlapRow

__all__ = ["Meeting", "measure_meeting"]

TIMES = 3
"""How often a meeting is measured."""

LEAST = 3
"""Computations, alone, for which the transfers of one measurement take as long at least."""


@dataclass(frozen=True)
class Meeting:
    """A computation and a transfer that every rank performs at the same time.

    Attributes:
        scope: whose links the transfer uses.
        sent: bytes that a rank sends in it.
        compute: the computation, once.
        transfer: the transfer, once.
    """

    scope: Scope
    sent: int
    compute: Callable[[], None]
    transfer: Callable[[], None]


def measure_meeting(meeting: Meeting, control: Control, device: torch.device, seconds: float) -> OverlapRow:
    """Each alone, then both, several times; the medians.

    Args:
        meeting: what meets.
        control: joins all ranks.
        device: where it computes.
        seconds: of all measurements, about.

    Returns:
        The row, the same on every rank.
    """
    once = seconds / (3 * TIMES)
    found = []
    for _ in range(TIMES):
        # Next to each other in time, so that what else goes on slows all three alike.
        computing = _alone(meeting.compute, control, device, once)
        transferring = _alone(meeting.transfer, control, device, once)
        # So long that several computations meet the transfers.
        count = math.ceil(max(once, LEAST * computing) / transferring)
        beside, slowed = _together(meeting, control, device, count)
        found.append((beside / computing, slowed / transferring))
    compute, transfer = (statistics.median(ratios) for ratios in zip(*found, strict=True))
    return OverlapRow(
        scope=str(meeting.scope),  # type: ignore[arg-type]
        sent=meeting.sent,
        compute=max(1.0, compute),
        transfer=max(1.0, transfer),
    )


def _alone(body: Callable[[], None], control: Control, device: torch.device, seconds: float) -> float:
    """Seconds of one call, mean over ranks; all ranks make equally many."""
    body()
    control.barrier()
    begin = time.perf_counter()
    body()
    finish(device)
    once = max(control.all_gather_object(time.perf_counter() - begin))
    count = max(2, round(seconds / once))
    control.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        body()
    finish(device)
    return control.all_reduce_mean([(time.perf_counter() - begin) / count])[0]


def _together(meeting: Meeting, control: Control, device: torch.device, count: int) -> tuple[float, float]:
    """Seconds of one computation and of one transfer while both go on, mean over ranks."""
    control.barrier()
    took: list[float] = []

    def send() -> None:
        begin = time.perf_counter()
        for _ in range(count):
            meeting.transfer()
        took.append((time.perf_counter() - begin) / count)

    sender = threading.Thread(target=send, name="thinwire-profile-sender")
    done, begin = 0, time.perf_counter()
    sender.start()
    while sender.is_alive() or not done:
        meeting.compute()
        finish(device)
        done += 1
    computing = (time.perf_counter() - begin) / done
    sender.join()
    if not took:
        # The thread's own error is on stderr; the others learn of it from the collective that this rank misses.
        raise RuntimeError("a transfer failed while computation went on")
    beside, slowed = control.all_reduce_mean([computing, took[0]])
    return beside, slowed
