"""Exchanges the change of parameters with other islands, at the end of the steps that the program says."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from thinwire.collectives.moves import Move, Moves
from thinwire.collectives.topology import AxisGroup
from thinwire.errors import MismatchError
from thinwire.program import Axis, Lane, Stage, due_fragments, exchange_parts, exchanged_units
from thinwire.sharding.islands.fragment_state import PartState
from thinwire.sharding.lanes.lanes import Load, Ticket
from thinwire.sharding.step.sharded_model import ShardedModel, unknown_progress


class Ended(NamedTuple):
    """What the end of a step, an entry or a last exchange has brought from other islands.

    Attributes:
        units: Numbers of the units with new masters.
        step: Optimizer steps taken now; the end of a step adds one, unless a slow island goes on at the step of the
            others.
        fetched: Whether these masters are a state that was fetched from another island, of that step.
    """

    units: frozenset[int]
    step: int
    fetched: bool = False


class Announced(NamedTuple):
    """What an island is about to exchange.

    Attributes:
        step: Updates made.
        fragment: The fragment.
        joins: Whether it is an exchange of ``join_islands``.
    """

    step: int
    fragment: int
    joins: bool

    def __str__(self) -> str:
        where = " in thinwire.join_islands()" if self.joins else ""
        return f"fragment {self.fragment} after step {self.step}{where}"


class Announcements:
    """What all islands are about to exchange: messages match by size alone, and fragments may have equal ones."""

    def __init__(self, group: AxisGroup, own: Announced, device: torch.device) -> None:
        self._index, self._across = group.index, group.hops[Stage.GATHER_ACROSS]
        self._rows = torch.zeros(group.size, len(own), dtype=torch.int64, device=device)
        for place, number in enumerate(own):
            self._rows[group.index, place] = number

    def gather(self) -> None:
        """Announce to each other, before the moves of the exchange."""
        self._across.gather_uncounted(list(self._rows))
        if not self._across.native:  # the host would wait for the device, so it compares once the exchange has ended
            self.compare()

    def compare(self) -> None:
        """Compare what the islands announced.

        Raises:
            MismatchError: Two islands exchange after different steps, or different fragments.
        """
        rows = [Announced(step, fragment, bool(joins)) for step, fragment, joins in self._rows.tolist()]
        own = rows[self._index]
        for island, other in enumerate(rows):
            if other != own:
                raise MismatchError(
                    f"island {self._index} exchanges {own}, and island {island} {other}: every island has to take as "
                    "many steps, so call optimizer.step() as often on all of them; a step whose gradient is not finite "
                    "counts as well with tw.optimizer(..., skip_nonfinite=True) or tw.LossScale, and not with "
                    "GradScaler or `continue`"
                )


@dataclass
class Pending:
    """An exchange that is under way.

    Attributes:
        due: Number of updates after which its result is written to the masters.
        tickets: Its collectives.
        announcements: What the islands said of it; ``None`` if it only goes on from a checkpoint.
    """

    due: int
    tickets: list[Ticket]
    announcements: Announcements | None = None

    def wait(self) -> None:
        for ticket in self.tickets:
            ticket.wait()
        if self.announcements is not None:
            self.announcements.compare()


class Exchanges:
    """The exchanges of one model with those of other islands, with the ``group`` of ranks that hold this rank's shares
    there.

    Attributes:
        share: Share of training that is done; ``None`` before it is known, for plans whose ``every`` changes.
        pending: Exchanges that are under way, by fragment.
        alike_since: By fragment, updates made when all islands last held the same masters.
    """

    def __init__(self, sharded: ShardedModel, group: AxisGroup) -> None:
        assert sharded.plan.islands is not None
        self._sharded, self._group, self._settings = sharded, group, sharded.plan.islands
        infos = [unit.info for unit in sharded.units]
        numbers = range(self._settings.fragments)
        self._units = [exchanged_units(sharded.plan, infos, fragment) for fragment in numbers]
        self.share: float | None = None if self._settings.schedule else 0.0
        self.pending: dict[int, Pending] = {}
        self.alike_since: dict[int, int] = {}

    @functools.cached_property
    def parts(self) -> list[list[PartState]]:
        """The state of each fragment's vectors. Before the first update, they start from the present masters."""
        sharded = self._sharded
        infos = [unit.info for unit in sharded.units]
        return [
            [PartState(sharded, part) for part in exchange_parts(sharded.plan, infos, fragment, sharded.share)]
            for fragment in range(self._settings.fragments)
        ]

    def hold(self) -> None:
        """Keep the present masters as what all islands agree on, unless there is something already."""
        assert self.parts

    def writes(self) -> bool:
        """Whether the step under way ends with new masters from an exchange."""
        step = self._sharded.steps.taken + 1
        arrives = any(pending.due <= step for pending in self.pending.values())
        return arrives or (self._settings.delay == 0 and bool(self._due(step)))

    def end_step(self) -> Ended:
        """Write what has arrived to the masters, and start the exchanges that are due, after an update."""
        step = self._sharded.steps.taken + 1
        written = [self._finish(f) for f in sorted(self.pending) if self.pending[f].due <= step]
        for fragment in self._due(step):
            if fragment in self.pending:  # its turn came sooner than before, as every has changed
                written.append(self._finish(fragment))
            self.pending[fragment] = self._start(Announced(step, fragment, joins=False), step + self._settings.delay)
            if self._settings.delay == 0:
                written.append(self._finish(fragment))
                self.alike_since[fragment] = step
        return Ended(frozenset(unit for units in written for unit in units), step)

    def finish(self) -> Ended:
        """End the exchanges under way, and exchange everything that was not exchanged after the last step, without a
        blend: then all islands hold the same masters. Collective over all islands."""
        step = self._sharded.steps.taken
        written = [self._finish(fragment) for fragment in sorted(self.pending)]
        for fragment in range(self._settings.fragments):
            if self.alike_since.get(fragment) != step:
                self.pending[fragment] = self._start(Announced(step, fragment, joins=True), step)
                written.append(self._finish(fragment, blends=False))
                self.alike_since[fragment] = step
        return Ended(frozenset(unit for units in written for unit in units), step)

    def wait(self) -> None:
        """Wait until the exchanges under way have ended; their results are written when they are due."""
        for pending in self.pending.values():
            pending.wait()

    def resume(self, pending: dict[int, int]) -> None:
        """Go on with exchanges that a checkpoint was saved in the middle of, by the updates after which each fragment's
        is due: their outer steps are made."""
        self.pending = {fragment: Pending(due, []) for fragment, due in pending.items()}
        for fragment, exchange in self.pending.items():
            for state in self.parts[fragment]:
                exchange.tickets += self._gather(state, fragment)

    def _due(self, step: int) -> tuple[int, ...]:
        return due_fragments(self._sharded.plan, step, self._known_share())

    def _known_share(self) -> float:
        if self.share is None:
            raise unknown_progress(f"islands.schedule = {[list(pair) for pair in self._settings.schedule]}")
        return self.share

    def _start(self, announced: Announced, due: int) -> Pending:
        lanes, tickets, fragment = self._sharded.lanes, list[Ticket](), announced.fragment
        announcements = Announcements(self._group, announced, self._sharded.device)
        for number, state in enumerate(self.parts[fragment]):
            mean, moves = state.exchange(self._group, self._sharded.seeds.of_exchange(fragment))
            if number == 0:
                moves = Moves([Move(Stage.GATHER_ACROSS, announcements.gather), *moves])
            part, step = state.part, functools.partial(state.step, mean)
            load = Load(f"exchange fragment {fragment}", Axis.ISLANDS, part.units, part.encoded)
            ticket = lanes.submit(Lane.OUTER, moves.then(step), load=load)
            tickets += [ticket, *self._gather(state, fragment, ticket)]
        return Pending(due, tickets, announcements)

    def _gather(self, state: PartState, fragment: int, *after: Ticket) -> list[Ticket]:
        """Gather the result of an outer step inside the island, if several ranks own the same shares."""
        moves = state.gather()
        if not moves:
            return []
        load = Load(f"gather fragment {fragment}", Axis.REPLICA, state.part.units)
        return [self._sharded.lanes.submit(Lane.OUTER, moves, after=after, load=load)]

    def _finish(self, fragment: int, *, blends: bool = True) -> tuple[int, ...]:
        """Wait for an exchange and write its result; returns the fragment's units."""
        self.pending.pop(fragment).wait()
        for state in self.parts[fragment]:
            state.finish(blends=blends)
        return self._units[fragment]
