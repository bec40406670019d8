"""What a runtime really did in a step, in the words of the program, which it never reads.

Lanes note the collectives that start and the tickets that computation waits for; units note when they are freed; the
runtime says at which event. Tests hold a journal against the program that the runtime performs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from thinwire.program import Axis, Event, Lane

__all__ = ["Journal", "Load", "StartedCollective", "JournaledStep"]


@dataclass(frozen=True, slots=True)
class Load:
    """What a collective carries, and along which axis.

    Attributes:
        label: its name in timelines.
        axis: the direction of the mesh.
        units: numbers of the units whose data it carries.
        encoded: whether the plan's codecs apply to these data.
    """

    label: str
    axis: Axis
    units: tuple[int, ...] = ()
    encoded: bool = False


class StartedCollective(NamedTuple):
    """One collective as the runtime started it; the fields are those of the program's operation."""

    lane: Lane
    axis: Axis
    units: tuple[int, ...]
    encoded: bool
    start: Event
    after: tuple[int, ...]


@dataclass
class JournaledStep:
    """What happened in one step.

    Attributes:
        starts: collectives in the order in which they started.
        waits: for each event, the numbers of the collectives that computation waited for. Numbers are positions in
            ``starts``, of the step in which the collective started.
        frees: for each event, the units whose gathered parameters were freed.
    """

    starts: list[StartedCollective] = field(default_factory=list)
    waits: dict[Event, list[int]] = field(default_factory=dict)
    frees: dict[Event, list[int]] = field(default_factory=dict)


class Journal:
    """Collects what happens, step by step.

    Args:
        now: the number of the present step, and its event.
    """

    def __init__(self, now: Callable[[], tuple[int, Event]]) -> None:
        self._now = now
        self._steps: dict[int, JournaledStep] = {}
        # By the identity of the ticket, which is kept alive: the number of its collective, and whether it was waited
        # for.
        self._tickets: dict[int, tuple[object, int]] = {}
        self._waited: set[int] = set()

    def step(self, number: int) -> JournaledStep:
        """What happened in the step of that number."""
        return self._steps.setdefault(number, JournaledStep())

    def started(self, lane: Lane, load: Load, ticket: object, after: tuple[object, ...]) -> None:
        """A collective starts; ``after`` are the tickets that it needs."""
        step, event = self._now()
        starts = self.step(step).starts
        self._tickets[id(ticket)] = ticket, len(starts)
        needed = tuple(self._tickets[id(other)][1] for other in after if id(other) in self._tickets)
        starts.append(StartedCollective(lane, load.axis, load.units, load.encoded, event, needed))

    def waited(self, ticket: object) -> None:
        """Computation waits for a ticket, whether or not it has finished by then."""
        if id(ticket) in self._waited or id(ticket) not in self._tickets:
            return
        self._waited.add(id(ticket))
        step, event = self._now()
        self.step(step).waits.setdefault(event, []).append(self._tickets[id(ticket)][1])

    def freed(self, unit: int) -> None:
        """A unit's gathered parameters are freed."""
        step, event = self._now()
        self.step(step).frees.setdefault(event, []).append(unit)
