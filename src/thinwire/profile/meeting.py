"""How computation and transfers slow each other down when a lane sends while a block computes (gamma).

A transfer beside computation waits for its turn on the processor whenever it wakes up, which takes as long whatever its
size, and may lose a share of memory bandwidth or of cores, which grows with it. So seconds beside computation are
``factor * alone + delay``, two constants for all sizes: transfers of several sizes, in short turns one after another,
tell both.
"""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from thinwire.collectives.group import Control
from thinwire.profile.timing import Deadline, finish
from thinwire.program import Scope
from thinwire.spec.profile import OverlapRow

__all__ = ["Meeting", "line", "measure_meetings"]

FEWEST_TURNS = 6
"""Turns of all transfers together, at least, even if the time is over: what a few tell can be five times off."""

ALONE = 3
"""Transfers that are timed alone in a turn; the median counts."""

FEWEST = 2
"""Transfers of a turn beside computation, at least."""

DELAY = 5e-3
"""Seconds by which a transfer is taken to be late when their number is decided."""

MOST_STOLEN = 0.75
"""Share of the processor that transfers are believed to take away at most."""


@dataclass(frozen=True)
class Meeting:
    """A transfer of one size that every rank performs at the same time.

    Attributes:
        scope: whose links it uses.
        sent: bytes that a rank sends in it.
        transfer: the transfer, once.
    """

    scope: Scope
    sent: int
    transfer: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Turn:
    """What one turn told.

    Attributes:
        meeting: what met computation.
        alone: seconds of one transfer.
        beside: seconds of one beside computation.
        stolen: share of that time by which computation was held up.
    """

    meeting: Meeting
    alone: float
    beside: float
    stolen: float


def measure_meetings(
    meetings: Sequence[Meeting],
    compute: Callable[[], None],
    hidden: int,
    control: Control,
    device: torch.device,
    deadline: Deadline,
    turn: float = 0.2,
) -> list[OverlapRow]:
    """Computation alone and beside transfers in turn, until the time is over.

    Args:
        meetings: of several sizes, of every scope; each has a turn before any has another.
        compute: the computation, once.
        hidden: width of the model it is of.
        control: joins all ranks.
        device: where it computes.
        deadline: when to stop; there are six turns in any case, and one of every scope.
        turn: seconds of one, about; it is one computation at least.

    Returns:
        A row of every scope, the same on every rank.
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
        # What else goes on changes the pace: computation is measured next to it in time, before and after.
        after = _computing(compute, control, device, turn)
        held_up = computing - calls * (before + after) / 2
        turns.append(_Turn(meeting, alone, beside, held_up / (count * beside)))
        before = after
    return _rows(turns, hidden)


def _rows(turns: Sequence[_Turn], hidden: int) -> list[OverlapRow]:
    factor, delay = line([(turn.alone, turn.beside) for turn in turns])
    found = []
    for scope in dict.fromkeys(turn.meeting.scope for turn in turns):
        here = [turn for turn in turns if turn.meeting.scope is scope]
        stolen = min(max(statistics.median(turn.stolen for turn in here), 0.0), MOST_STOLEN)
        found.append(
            OverlapRow(
                scope=str(scope),  # type: ignore[arg-type]
                sent=max(turn.meeting.sent for turn in here),
                compute=1 / (1 - stolen),
                transfer=factor,
                delay=delay,
                hidden=hidden,
            )
        )
    return found


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The line through points that is off by least in sum (least absolute deviations), so that outliers count little.

    Where no transfer takes longer alone than what transfers lose, a slope would be told from noise: it is 1 then.

    Args:
        points: seconds of a transfer alone, and beside computation; one at least.

    Returns:
        Its slope, 1 at least, and its intercept in seconds, 0 at least.
    """
    lost = statistics.median(y - x for x, y in points)
    if max(x for x, _ in points) < lost:
        return 1.0, lost
    # A best line goes through two of the points, or through one of them where a bound holds.
    slopes = {1.0} | {y / x for x, y in points if x > 0}
    slopes |= {(d - b) / (c - a) for (a, b), (c, d) in itertools.combinations(points, 2) if a != c}
    candidates = (
        (slope, max(0.0, statistics.median(y - slope * x for x, y in points))) for slope in slopes if slope >= 1
    )
    return min(candidates, key=lambda at: (sum(abs(y - at[0] * x - at[1]) for x, y in points), at))


def _computing(compute: Callable[[], None], control: Control, device: torch.device, turn: float) -> float:
    """Seconds of one computation alone, mean over ranks: none stops long before the others, as in training."""
    control.barrier()
    done, begin = 0, time.perf_counter()
    while not done or time.perf_counter() - begin < turn:
        compute()
        finish(device)
        done += 1
    return control.all_reduce_mean([(time.perf_counter() - begin) / done])[0]


def _transferring(meeting: Meeting, control: Control, device: torch.device) -> float:
    """Seconds of one transfer alone, the median, mean over ranks."""
    control.barrier()
    taken = []
    for _ in range(ALONE):
        begin = time.perf_counter()
        meeting.transfer()
        finish(device)
        taken.append(time.perf_counter() - begin)
    return control.all_reduce_mean([statistics.median(taken)])[0]


def _together(
    meeting: Meeting, compute: Callable[[], None], control: Control, device: torch.device, count: int
) -> tuple[float, float, float]:
    """Seconds of computing, how many computations they were, and seconds of one of so many transfers beside them; mean
    over ranks."""
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
        # The thread's own error is on stderr; the others learn of it from the collective that this rank misses.
        raise RuntimeError("a transfer failed while computation went on")
    seconds, calls, beside = control.all_reduce_mean([computing, float(done), took[0]])
    return seconds, calls, beside
