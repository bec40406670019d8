"""Reduces gradients: keeps track of whose turn it is, and of the reductions in flight.

Every rank reduces units in the same order, the reverse of their forward, no matter in which order autograd delivers
gradients. A unit that is ready early waits for its predecessors. A unit that never becomes ready is reduced at the end
of the backward.

The program determines which reductions start in a unit's turn, and which of them computation then waits for. At an
event, several units may be ready at once, or none, and autograd may deliver gradients in another order than in the
trace. The program is therefore cut into *turns*, one for each unit. A turn stays valid at whatever event it comes.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from thinwire.program import LEAVING, Event, HostLane, Lane, Operation, StepProgram
from thinwire.sharding.grads.host_memory import HostAccumulator
from thinwire.sharding.grads.reductions import Reductions
from thinwire.sharding.grads.unit_gradient import UnitGradient
from thinwire.sharding.lanes.lanes import Lanes, Ticket

_REDUCTIONS = (Lane.REDUCE, Lane.SYNC)


@dataclass(frozen=True, slots=True)
class ReductionTurn:
    """The actions of one unit's turn.

    Attributes:
        starts: Reductions to start, in order.
        waits: Reductions that computation then waits for, counted back from the newest one, which is 0. Unlike indices
            of operations, these counts are the same in every micro-batch.
        finishes: Units whose gradients take part in no later reduction of this micro-batch.
        continued: Indices of operations in ``starts`` whose results another reduction takes on.
    """

    starts: tuple[Operation, ...] = ()
    waits: tuple[int, ...] = ()
    finishes: tuple[int, ...] = ()
    continued: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Turns:
    """The program of one backward.

    Attributes:
        by_unit: Turns of the trainable units of the forward, in reduction order.
        late: Returns the turn of a unit that is reduced by itself because its gradients came late.
    """

    by_unit: Mapping[int, ReductionTurn]
    late: Callable[[int], ReductionTurn]


@dataclass
class _UnderWay:
    """A reduction that has started, with the units whose gradients it carries; ``waited`` once computation has."""

    ticket: Ticket
    units: tuple[int, ...]
    waited: bool = False

    def wait(self) -> None:
        """Let computation wait for it, unless it has done so before."""
        if not self.waited:
            self.waited = True
            self.ticket.wait()


class Reducer:
    """Reduces the gradients of all units.

    Attributes:
        gradients: Gradients by unit, for units with trainable parameters; one for each trainable buffer, in order.
        parts: Gradients of all units.
        reductions: Builds the collectives.
        feedback: The rounding errors of this rank's messages.
        on_host: Whether gradients live on the host.
    """

    def __init__(
        self,
        gradients: Mapping[int, Sequence[UnitGradient]],
        reductions: Reductions,
        lanes: Lanes,
        *,
        on_host: bool,
    ) -> None:
        self.gradients, self.reductions, self.feedback = gradients, reductions, reductions.feedback
        self.feedback.settle = self.join
        self.recount()
        self._lanes, self.on_host = lanes, on_host
        self._turns = Turns({}, lambda _: ReductionTurn())
        self._pending: deque[int] = deque()  # units whose turn has not come yet, in order
        self._ready: set[int] = set()  # units whose gradients are complete, and whose turn has not come yet
        self._reduced: set[int] = set()  # units whose turn is over
        self._under_way: deque[_UnderWay] = deque()  # from the oldest one not waited for; the newest is last
        self._updates: dict[int, Ticket] = {}  # updates that read gradients, by unit
        self._tickets: dict[int, Ticket] = {}  # tickets of this backward, by the operation's index
        self._last = True  # whether this is the step's last backward
        self._leaving: deque[Sequence[HostAccumulator]] = deque()  # gradients on their way to the host, in order

    def recount(self) -> None:
        """Take all gradients of the units: in the beginning, and when there are others, while nothing is reduced."""
        self.parts = tuple(part for parts in self.gradients.values() for part in parts)
        self.reductions.recut()

    # -- a backward, from begin to end -------------------------------------------------------------------------

    def begin(self, turns: Turns, *, last: bool) -> None:
        """Begin a backward, which may be the step's last, with its turns, in the same order on every rank."""
        # Of most units it has ended, as the forward has read their parameters; but gradients of others become zero.
        self._join_updates()
        if self._last:
            # If backwards follow each other without a step in between, reductions may still be in flight, and nothing
            # may be added to the buffers that they write.
            self.join()
        self._last, self._turns = last, turns
        self._pending = deque(turns.by_unit)
        self._ready.clear()
        self._reduced.clear()
        self._tickets.clear()

    def collect(self, unit: int, index: int, grad: torch.Tensor) -> bool:
        """Take one parameter's gradient; returns whether its unit is now complete."""
        parts = self.gradients[unit]
        part = parts[0] if len(parts) == 1 else next(p for p in reversed(parts) if p.first_slot <= index)
        if late := unit in self._reduced:
            self.join()  # a late gradient may scale a sum that a reduction in flight writes
        part.collect(index - part.first_slot, grad, last=self._last, late=late)
        part.unsynced = True
        return part.complete and _complete(parts)

    def take_whole(self, unit: int, grads: list[torch.Tensor]) -> None:
        """Take the gradients of all trained parameters of a unit, in order, and mark the unit as complete."""
        parts, part = self.gradients[unit], self.gradients[unit][0]
        is_next = self._pending and self._pending[0] == unit and not self._ready
        if is_next and len(parts) == 1 and part.waits and not part.seen and len(grads) == len(part.layout.slots):
            self._pending.popleft()
            part.unsynced = True
            self._perform(unit, self._turns.by_unit[unit], grads)
            return
        if late := unit in self._reduced:
            self.join()  # as for a single gradient
        for part in parts:
            part.collect_all(grads, last=self._last, late=late)
            part.unsynced = True
        self.ready(unit)

    def ready(self, unit: int) -> None:
        """Mark a unit as complete. Reduce it, and the units that waited for it, in order."""
        self._ready.add(unit)
        while self._pending and self._pending[0] in self._ready:
            due = self._pending.popleft()
            self._ready.discard(due)
            self._perform(due, self._turns.by_unit[due])

    def may_wait(self, unit: int) -> bool:
        """Whether a unit that is ready can be marked later, together with the next one: nothing happens in its turn,
        and no other unit waits for it."""
        turn = self._turns.by_unit.get(unit)
        return not self._ready and (turn is None or not (turn.starts or turn.waits))

    def delivered(self, unit: int) -> bool:
        """Whether every parameter of a unit has delivered its gradient in this backward."""
        return unit in self._reduced or _complete(self.gradients[unit])

    def end(self) -> None:
        """End the backward: reduce the units that never became complete, and gradients that came late."""
        while self._pending:
            self.ready(self._pending[0])
        for unit, parts in self.gradients.items():
            if any(part.seen or (self._last and part.unsynced) for part in parts):
                self._tickets.clear()
                if unit in self._reduced:
                    self.join()  # the unit's turn may have waited for others, and begun after late gradients came
                    for part in parts:
                        part.expect_sum()
                self._perform(unit, self._turns.late(unit))
        self._reduced.clear()

    def abort(self) -> frozenset[int]:
        """Drop the gradients that a failed backward has collected, once reductions in flight have finished; returns the
        units that were complete in it. What earlier backwards have left for them is lost as well: the next one would
        add to the sum of both."""
        self._pending.clear()
        self._ready.clear()
        self.reductions.drop_sources()
        self.join()
        for unit in self._reduced:
            for part in self.gradients[unit]:
                part.reset()
        for part in self.parts:
            part.drop()
        if self.on_host:
            self._send_home(self.gradients)
        return frozenset(self._reduced)

    def join(self) -> None:
        """Wait until every reduction has finished, and gradients are where they live."""
        while self._under_way:
            self._under_way.popleft().wait()
        if self._leaving:
            self._join_departures()

    def settle(self) -> None:
        """Wait until all gradients may be written, and the host can read those that live there."""
        self._join_updates()
        self.join()
        if self.on_host:
            self._lanes.settle(HostLane.DOWN)

    def join_unit(self, unit: int) -> None:
        """Wait until every reduction of one unit has finished, and the update that reads its gradients."""
        for reduction in self._under_way:
            if unit in reduction.units:
                reduction.wait()
        if (update := self._updates.pop(unit, None)) is not None:
            update.wait()

    def expect(self, ticket: Ticket, units: Sequence[int]) -> None:
        """Take the ticket of an update, which reads the gradients of units: nothing writes them before it has
        finished."""
        self._updates |= dict.fromkeys(units, ticket)

    def arrivals(self, order: Iterable[int], *, apart: bool) -> Iterator[Sequence[int]]:
        """Wait for the gradients of units, in the order in which they arrive, one reduction after another. Yields units
        whose gradients have arrived together, or every unit ``apart``. The first are those that computation has waited
        for before."""
        last = {unit: number for number, one in enumerate(self._under_way) if not one.waited for unit in one.units}
        groups = {unit: (last.get(unit), unit if apart else None) for unit in order}
        for _, units in itertools.groupby(groups, groups.__getitem__):
            together = tuple(units)
            for unit in together if together[0] in last else ():
                self.join_unit(unit)
            yield together

    def encode(self, *, wanted: bool) -> None:
        """Set whether gradients are encoded from now on; they are by default. Rounding errors end with encoding; those
        of a checkpoint stay where it goes on."""
        if not wanted:
            self.forget_lost()
        self.reductions.encodes = wanted

    def rescale_lost(self, factor: float) -> None:
        """Multiply the rounding errors that error feedback keeps, because later gradients have another loss scale: the
        new one divided by the old one is the factor."""
        lost = list(self.feedback.lost.values())
        if lost and factor != 1.0:
            self.join()
            torch._foreach_mul_(lost, factor)

    def forget_lost(self) -> None:
        """Forget the rounding errors of earlier gradients (error feedback)."""
        self.join()
        self.feedback.lost.clear()

    def _join_updates(self) -> None:
        for update in dict.fromkeys(self._updates.values()):
            update.wait()
        self._updates.clear()

    # -- one unit's turn ---------------------------------------------------------------------------------------

    def fetch(self, unit: int) -> None:
        """Let the gradients of earlier micro-batches come up, because the backward of a unit begins."""
        for part in self.gradients.get(unit, ()):
            for buffer in part.buffers:
                buffer.come_up()

    def _send_home(self, units: Iterable[int]) -> None:
        """Let the gradients of units go down that take part in no later reduction of this micro-batch, each once the
        oldest of several that are on their way have arrived."""
        for unit in units:
            after = [reduction.ticket for reduction in self._under_way if unit in reduction.units]
            buffers = [one for part in self.gradients[unit] for one in part.buffers]
            visiting = [one for one in buffers if isinstance(one, HostAccumulator) and one.visits]
            for one in visiting:
                one.go_down(after)
            self._leaving.append(visiting)
            self._join_departures(LEAVING)

    def _join_departures(self, most: int = 0) -> None:
        """Wait until the gradients of no more than so many units are on their way to the host."""
        while len(self._leaving) > most:
            for one in self._leaving.popleft():
                one.leave()

    def _perform(self, unit: int, turn: ReductionTurn, grads: list[torch.Tensor] | None = None) -> None:
        """Perform a unit's turn; ``grads`` are those of its only buffer, if they come only now."""
        self._reduced.add(unit)
        for part in self.gradients[unit]:
            self.reductions.take(part, part.finish(last=self._last, grads=grads))
        for operation in turn.starts:
            moves, load = self.reductions.moves(operation, goes_on=operation.index in turn.continued)
            after = [self._tickets[index] for index in operation.after if index in self._tickets]
            ticket = self._tickets[operation.index] = self._lanes.submit(operation.lane, moves, after=after, load=load)
            self._under_way.append(_UnderWay(ticket, load.units))
        self.reductions.finish(turn.finishes, last=self._last)
        if self.on_host:
            self._send_home(turn.finishes)
        # Resolve all counts before waiting, because they count back from the newest reduction.
        for reduction in [self._under_way[-1 - ago] for ago in turn.waits if ago < len(self._under_way)]:
            reduction.wait()
        while self._under_way and self._under_way[0].waited:
            self._under_way.popleft()


def _complete(parts: Sequence[UnitGradient]) -> bool:
    """Whether every parameter of a unit has delivered its gradient in this backward."""
    return all(part.complete for part in parts)


def reduction_turns(program: StepProgram, micro_batch: int, order: Sequence[int]) -> Mapping[int, ReductionTurn]:
    """Cut the reductions of one micro-batch of a step's program into turns of its trainable units, which are given and
    returned in reduction order."""
    reductions = [op for op in program.operations if op.lane in _REDUCTIONS]
    position = {op.index: number for number, op in enumerate(reductions)}
    mine = [op for op in reductions if op.start.micro_batch == micro_batch]
    starts: dict[int, list[Operation]] = {unit: [] for unit in order}
    place = {unit: number for number, unit in enumerate(order)}
    turns: dict[int, int] = {}  # operation -> the unit in whose turn it starts
    turn_of: dict[int, int] = {}  # unit -> the unit in whose turn its last reduction starts
    closing: dict[Event, tuple[int, int]] = {}  # event -> the last turn taken at it, and that turn's newest reduction
    for op in mine:
        # A reduction starts when the last of its gradients exist, and those before it that it takes on have started.
        before = (turns[index] for index in op.after if index in turns)
        turn = turns[op.index] = max((op.units[-1], *before), key=place.__getitem__)
        starts[turn].append(op)
        turn_of.update(dict.fromkeys(op.units, turn))
        closing[op.start] = turn, position[op.index]
    waits = {
        turn: tuple(newest - position[index] for index in program.waits.get(event, ()) if index in position)
        for event, (turn, newest) in closing.items()
    }
    finishes: dict[int, list[int]] = {}
    for unit in starts:
        finishes.setdefault(turn_of.get(unit, unit), []).append(unit)
    taken_on = {index for op in mine for index in op.after}
    return {
        unit: ReductionTurn(
            tuple(operations),
            waits.get(unit, ()),
            tuple(finishes.get(unit, ())),
            frozenset(op.index for op in operations if op.index in taken_on),
        )
        for unit, operations in starts.items()
    }
