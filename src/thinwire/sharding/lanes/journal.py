"""Records the actions of a runtime in a step, in the terms of the program but without reading it.

Lanes record the collectives that start and the tickets that computation waits for. Units record when they are freed.
The runtime provides the event. Tests compare a journal with the program that the runtime performs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from thinwire.program import Axis, Event, Lane

__all__ = ["Journal", "Load", "StartedCollective", "JournaledStep"]


@dataclass(frozen=True, slots=True)
class Load:
    """Description of a collective's data, and its axis.

    Attributes:
        label: Name of the collective in timelines.
        axis: Axis of the mesh that the collective runs along.
        units: Numbers of the units whose data the collective carries.
        encoded: Whether the plan's codecs apply to the data.
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
    """The actions of one step.

    Attributes:
        starts: Collectives, in the order in which they started.
        waits: By event, the numbers of the collectives that computation waited for. A number is a position in
            ``starts`` of the step in which the collective started.
        frees: By event, the units whose gathered parameters were freed.
    """

    starts: list[StartedCollective] = field(default_factory=list)
    waits: dict[Event, list[int]] = field(default_factory=dict)
    frees: dict[Event, list[int]] = field(default_factory=dict)


class Journal:
    """Collects the actions of a runtime, by step.

    Args:
        now: Returns the number of the current step and its current event.
    """

    def __init__(self, now: Callable[[], tuple[int, Event]]) -> None:
        self._now = now
        self._steps: dict[int, JournaledStep] = {}
        # The key is the identity of a ticket, which is kept alive. The value holds the number of its collective, and
        # whether computation has waited for it.
        self._tickets: dict[int, tuple[object, int]] = {}
        self._waited: set[int] = set()

    def step(self, number: int) -> JournaledStep:
        """The actions of the step with that number."""
        return self._steps.setdefault(number, JournaledStep())

    def started(self, lane: Lane, load: Load, ticket: object, after: tuple[object, ...]) -> None:
        """Record that a collective starts; ``after`` holds the tickets that it waits for."""
        step, event = self._now()
        starts = self.step(step).starts
        self._tickets[id(ticket)] = ticket, len(starts)
        needed = tuple(self._tickets[id(other)][1] for other in after if id(other) in self._tickets)
        starts.append(StartedCollective(lane, load.axis, load.units, load.encoded, event, needed))

    def waited(self, ticket: object) -> None:
        """Record that computation waits for a ticket, even if the ticket has already finished."""
        if id(ticket) in self._waited or id(ticket) not in self._tickets:
            return
        self._waited.add(id(ticket))
        step, event = self._now()
        self.step(step).waits.setdefault(event, []).append(self._tickets[id(ticket)][1])

    def freed(self, unit: int) -> None:
        """Record that a unit's gathered parameters are freed."""
        step, event = self._now()
        self.step(step).frees.setdefault(event, []).append(unit)
