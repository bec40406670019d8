"""Records the actions of a runtime in a step, in the terms of the program but without reading it.

It stands around the calls with which collectives start, computation waits for their tickets, and units are freed. Tests
compare a journal with the program that the runtime performs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch

from thinwire.collectives.topology import AxisGroup
from thinwire.program import Axis, Event, Lane
from thinwire.sharding.lanes import lanes, streams
from thinwire.sharding.lanes.lanes import Load
from thinwire.sharding.params.param_group import Unit
from thinwire.sharding.runtime.runtime import Runtime
from thinwire.sharding.step import step_check

__all__ = ["Journal", "JournaledStep", "StartedCollective", "keep_journal"]


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


@contextlib.contextmanager
def keep_journal(engine: Runtime) -> Iterator[Journal]:
    """Keep a journal of the collectives that start, the waits of computation, and the units that are freed."""
    journal = Journal(lambda: (engine.num_steps, Event(*engine.passes.state.at, engine.schedule.micro_batch)))
    submit, free, gather_rows = lanes.Lanes.submit, Unit.free, step_check.gather_rows

    def noted_submit(
        self: lanes.Lanes, lane: Lane, work: Any, *, after: Sequence[Any] = (), load: Load = lanes.UNNAMED
    ) -> Any:
        ticket = submit(self, lane, work, after=after, load=load)
        if self is engine.lanes:
            journal.started(lane, load, ticket, tuple(after))
        return ticket

    def noted_free(self: Unit) -> bool:
        freed = free(self)
        if freed and engine.units[self.index] is self:
            journal.freed(self.index)
        return freed

    def noted_rows(group: AxisGroup, row: torch.Tensor) -> torch.Tensor:
        rows = gather_rows(group, row)
        if group.size > 1:
            exchange = object()  # what computes next comes after it, so it starts and is waited for at the same time
            journal.started(Lane.CONTROL, Load("control", Axis.WORLD), exchange, ())
            journal.waited(exchange)
        return rows

    def noted_wait(ticket: type) -> Any:
        wait: Callable[[Any], None] = ticket.wait  # type: ignore[attr-defined]

        def noted(self: Any) -> None:
            journal.waited(self)
            wait(self)

        return mock.patch.object(ticket, "wait", noted)

    with (
        mock.patch.object(lanes.Lanes, "submit", noted_submit),
        mock.patch.object(Unit, "free", noted_free),
        mock.patch.object(step_check, "gather_rows", noted_rows),
        noted_wait(lanes._ThreadTicket),
        noted_wait(streams._StreamTicket),
    ):
        yield journal
