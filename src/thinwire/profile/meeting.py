"""Measures how computation and transfers slow each other down when a lane sends while a block computes (gamma).

A transfer during computation waits for its turn of the processor. That takes as long for any size, and data that are
under way go on meanwhile: a transfer that lasts longer than the wait hardly loses anything. It may also lose a share of
memory bandwidth or of cores, which grows with its size. So its seconds during computation are
``hypot(factor * alone, delay)``, with two constants for all sizes. Short turns of transfers of several sizes determine
both.

Where processors compute, they also send: the kernel and the transport copy every byte, and nothing hides that work. A
thread that does nothing but copy shows its cost, how much computation is delayed by each second of processor time that
its rank uses for something else. That is zero if a core is free for the thread. It is several seconds per second if
ranks share cores and caches, and every rank has such a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from thinwire.collectives.group import Control
from thinwire.profile.timing import Call, Deadline, clocked, finish
from thinwire.program import Scope
from thinwire.spec.profile import OverlapRow

FEWEST_TURNS = 6
"""Minimum number of turns, even past the deadline: the result of fewer turns can be wrong by a factor of 5."""

ALONE = 3
"""Number of transfers to time alone in a turn; their median counts."""

FEWEST = 2
"""Minimum number of transfers during computation in a turn."""

DELAY = 5e-3
"""Assumed delay of a transfer in seconds, for choosing the number of transfers."""

MOST_STOLEN = 0.75
"""Upper limit for the measured share of the processor that transfers take."""

_CROWDED_TURNS = 8
"""Turns beside a thread that copies. All of them count: other work of the machine may slow down either part of one."""

_BYTES = 1 << 21
"""Bytes that the thread copies at once, about as many as a part of a bucket in flight."""


@dataclass(frozen=True)
class Meeting:
    """A transfer of one size that every rank performs at the same time.

    Attributes:
        scope: Links that it uses.
        sent: Bytes that a rank sends in it.
        transfer: Performs the transfer once.
    """

    scope: Scope
    sent: int
    transfer: Call


@dataclass(frozen=True, slots=True)
class _Turn:
    """Seconds of a transfer alone and during computation, and the delay of computation as a share of the latter."""

    meeting: Meeting
    alone: float
    beside: float
    stolen: float


def measure_meetings(
    meetings: Sequence[Meeting],
    compute: Call,
    hidden: int,
    control: Control,
    device: torch.device,
    deadline: Deadline,
    turn: float = 0.2,
) -> list[OverlapRow]:
    """Time computation alone and during transfers in turn, until the deadline.

    Args:
        meetings: Transfers of several sizes in every scope; each has a turn before any has a second one.
        compute: Runs the computation once.
        hidden: Width of the model that computes.
        control: Connects all ranks.
        device: Device that computes.
        deadline: When to stop. There are always at least six turns, and one of every scope.
        turn: Approximate seconds of a turn, which contains at least one computation.

    Returns:
        One row per scope, the same on every rank.
    """
    compute()
    turns: list[_Turn] = []
    before = _computing(compute, control, device, turn)
    scopes = {meeting.scope for meeting in meetings}
    for meeting in itertools.cycle(meetings):
        enough = len(turns) >= FEWEST_TURNS and {turn.meeting.scope for turn in turns} == scopes
        if enough and deadline.passed():
            break
        alone = _transferring(meeting, control, device)
        count = max(FEWEST, math.ceil(max(turn, 1.2 * before) / (alone + DELAY)))
        computing, calls, beside = _together(meeting, compute, control, device, count)
        # Other work changes the pace of the machine, so computation alone is timed right before and right after.
        after = _computing(compute, control, device, turn)
        held_up = computing - calls * (before + after) / 2
        turns.append(_Turn(meeting, alone, beside, held_up / (count * beside)))
        before = after
    return _rows(turns, hidden)


def _rows(turns: Sequence[_Turn], hidden: int) -> list[OverlapRow]:
    factor, delay = slowdown([(turn.alone, turn.beside) for turn in turns])
    rows = []
    for scope in dict.fromkeys(turn.meeting.scope for turn in turns):
        scope_turns = [turn for turn in turns if turn.meeting.scope is scope]
        stolen = min(max(statistics.median(turn.stolen for turn in scope_turns), 0.0), MOST_STOLEN)
        rows.append(
            OverlapRow(
                scope=str(scope),  # type: ignore[arg-type]
                sent=max(turn.meeting.sent for turn in scope_turns),
                compute=1 / (1 - stolen),
                transfer=factor,
                delay=delay,
                hidden=hidden,
            )
        )
    return rows


def slowdown(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The factor and the delay with the least absolute deviations from the points, so that outliers count little.

    If every transfer takes less time alone than it loses, a fitted factor would only reflect noise, so the factor is 1.

    Args:
        points: Seconds of a transfer alone and during computation; at least one point.

    Returns:
        The factor, at least 1, and the delay in seconds, 0 if no transfer was as short.
    """
    lost = statistics.median(beside - alone for alone, beside in points)
    if max(alone for alone, _ in points) < lost:
        return 1.0, statistics.median(_delay(point, 1.0) for point in points)
    # The best curve passes through two of the points, or through one of them if a bound is active.
    factors = {1.0} | {beside / alone for alone, beside in points if 0 < alone < beside}
    squares = [(alone**2, beside**2) for alone, beside in points]
    slopes = [(d - b) / (c - a) for (a, b), (c, d) in itertools.combinations(squares, 2) if a != c]
    factors |= {math.sqrt(slope) for slope in slopes if slope >= 1}
    candidates = {(factor, _delay(point, factor)) for factor in factors for point in points}

    def deviation(at: tuple[float, float]) -> tuple[float, tuple[float, float]]:
        return sum(abs(beside - math.hypot(at[0] * alone, at[1])) for alone, beside in points), at

    return min(candidates, key=deviation)


def _delay(point: tuple[float, float], factor: float) -> float:
    """The delay with which a factor explains a point; 0 if the factor is more than enough."""
    alone, beside = point
    return math.sqrt(max(0.0, beside**2 - (factor * alone) ** 2))


def _computing(compute: Call, control: Control, device: torch.device, turn: float) -> float:
    """Seconds of one computation alone, mean over ranks. As in training, no rank stops long before the others."""
    control.barrier()
    done, begin = 0, time.perf_counter()
    while not done or time.perf_counter() - begin < turn:
        compute()
        finish(device)
        done += 1
    return control.all_reduce_mean([(time.perf_counter() - begin) / done])[0]


def _transferring(meeting: Meeting, control: Control, device: torch.device) -> float:
    """Median seconds of one transfer alone, mean over ranks."""
    control.barrier()
    taken = []
    for _ in range(ALONE):
        begin = time.perf_counter()
        meeting.transfer()
        finish(device)
        taken.append(time.perf_counter() - begin)
    return control.all_reduce_mean([statistics.median(taken)])[0]


def _together(
    meeting: Meeting, compute: Call, control: Control, device: torch.device, count: int
) -> tuple[float, float, float]:
    """Seconds of computation, the number of computations, and the seconds of one of ``count`` transfers during them.

    All three are means over ranks.
    """
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
        compute()
        finish(device)
        done += 1
    computing = time.perf_counter() - begin
    sender.join()
    if not took:
        # The thread has printed its error to stderr. The other ranks fail in the collective that this rank misses.
        raise RuntimeError("a transfer failed during computation")
    seconds, calls, beside = control.all_reduce_mean([computing, float(done), took[0]])
    return seconds, calls, beside


# -- what computation loses to other work of its rank -----------------------------------------------------------------


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
    for _ in range(_CROWDED_TURNS):
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
