"""The schedule of a step: its position in the program, and the actions of the program at that position.

Units act on demand and are correct by themselves; this module adds prefetch, order and overlap. Step 0 runs on demand
and is recorded as a trace. From then on, the program is lowered from the trace, and hooks look up what to start. If
events deviate from the trace (a conditional unit, two forwards before a backward), the rest of the micro-batch gathers
on demand, and its reductions follow a program that is lowered from its own forward. The trace is then replaced, and the
deviation is reported once. Programs and the cursor in them are one file, because neither is understood alone.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from typing import Final

from thinwire.program import (
    UNDER_WAY,
    Axis,
    Event,
    HostLane,
    Lane,
    Lookahead,
    Moment,
    Operation,
    Phase,
    StepProgram,
    Trace,
    UnitInfo,
    any_gathered,
    default_trace,
    lower,
)
from thinwire.program.gathers import Retention, retention
from thinwire.sharding.grads.reducer import ReductionTurn, Turns, reduction_turns
from thinwire.sharding.params.param_group import GatherBatch
from thinwire.spec import Plan

log = logging.getLogger("thinwire")

MOST_EVENTS = 1 << 18
"""Most forward events of one micro-batch to remember."""

_MASK = (1 << 62) - 1
_CODES = {phase: code for code, phase in enumerate(Phase, start=1)}

MOST_PROGRAMS = 16
"""Most programs to cache, so that a model whose order of units keeps changing does not fill the memory."""

ANY_MICRO_BATCHES = UNDER_WAY + 2
"""Micro-batches in the program that represents all longer ones. From this length on, waits follow a fixed pattern."""

Place = tuple[int, int]
"""The representative of a micro-batch: its number in a program, and the number of micro-batches in that program."""


def place_of(micro_batch: int, *, last: bool) -> Place:
    """The representative of a micro-batch in a step whose length is not known yet."""
    if last:
        count = min(micro_batch, ANY_MICRO_BATCHES - 1) + 1
        return count - 1, count
    return min(micro_batch, ANY_MICRO_BATCHES - 2), ANY_MICRO_BATCHES


_NOTHING: Final = Retention(frozenset(), frozenset(), frozenset())
"""What stays gathered where there is no trace."""


class Programs:
    """The programs of one model, each lowered once, and what hooks look up in them, which is made once as well.

    Attributes:
        position: Position in the mesh of the rank that performs the programs.
        trace: Order of units that the tables follow; ``None`` before the end of the first micro-batch.
        repeated: Units of the trace that both its forward and its backward need.
        prefetches: Of a place, by the position of a forward event or by a backward event, the gathers that the event
            starts for later.
        retained: The units that a micro-batch does not free, of whether it is the step's last.
        turns: The reductions of a micro-batch that follows the trace, of its place.
    """

    def __init__(self, plan: Plan, infos: Sequence[UnitInfo], position: int) -> None:
        self.plan, self.infos, self.position = plan, infos, position
        self.trace: Trace | None = None
        self.repeated = frozenset[int]()
        self._lowered = lru_cache(MOST_PROGRAMS)(self._lower)
        self.prefetches, self.retained = cache(self._tabulate), cache(self._retain)
        self.turns = cache(lambda place: self.cut(self._trace_so_far(), place))

    def program(
        self,
        micro_batches: int,
        *,
        clip: bool = False,
        trace: Trace | None = None,
        unit_by_unit: bool = False,
        fragments: tuple[int, ...] = (),
    ) -> StepProgram:
        """The program of a step with so many forward and backward passes, which may add up the gradient norm to
        ``clip``, follows the adopted trace by default, and begins to exchange ``fragments`` with other islands. With
        ``unit_by_unit``, every unit is reduced in a bucket of its own."""
        return self._lowered(trace or self._trace_so_far(), micro_batches, clip, unit_by_unit, fragments)

    def _lower(
        self, trace: Trace, micro_batches: int, clip: bool, unit_by_unit: bool, fragments: tuple[int, ...]
    ) -> StepProgram:
        plan = self.plan.model_copy(update={"bucket_bytes": 1, "reduce_bytes": 0}) if unit_by_unit else self.plan
        return lower(
            plan,
            self.infos,
            micro_batches=micro_batches,
            trace=trace,
            position=self.position,
            clip=clip,
            fragments=fragments,
        )

    def adopt(self, trace: Trace) -> None:
        """Follow another trace from now on."""
        self.trace, self.repeated = trace, frozenset(trace.needed) & frozenset(trace.needed_again)
        self._forget_tables()

    def replan(self, plan: Plan) -> None:
        """Switch to a plan that differs only in its codecs."""
        self.plan = plan
        self._lowered.cache_clear()
        self._forget_tables()

    def restart(self, infos: Sequence[UnitInfo]) -> None:
        """Begin anew with units of which other parameters are trained."""
        self.infos, self.trace, self.repeated = infos, None, frozenset()
        self.replan(self.plan)

    # -- what the program says ---------------------------------------------------------------------------------

    @cached_property
    def spreads(self) -> Mapping[tuple[int, ...], Sequence[tuple[Operation, bool]]]:
        """The spreads of updated parameters, by the units that travel together, in the order in which the forward needs
        the units; each with a flag that is true if the step waits for it."""
        program, step = self.program(1), Event(Phase.STEP, -1, 0)
        waited = program.waits.get(step, ())
        batches: list[tuple[dict[int, None], list[tuple[Operation, bool]]]] = []
        for op in program.starts(step):
            if op.lane is Lane.SPREAD:
                if not batches or batches[-1][0].keys().isdisjoint(op.units):
                    batches.append(({}, []))
                units, operations = batches[-1]
                units.update(dict.fromkeys(op.units))
                operations.append((op, op.index in waited))
        return {tuple(units): operations for units, operations in batches}

    @cached_property
    def updates(self) -> Sequence[tuple[int, ...]]:
        """The batches of units whose states pass through the device together, in order; none if states live there."""
        step = self.program(1).starts(Event(Phase.STEP, -1, 0))
        return [op.units for op in step if op.lane is HostLane.UPDATE]

    @cached_property
    def update_order(self) -> tuple[int, ...]:
        """Units in the order in which their gradients arrive; units that the forward skipped come first."""
        traced = self._trace_so_far().reduction_order
        return (*(u for u in reversed(range(len(self.infos))) if u not in traced), *traced)

    def following(self, unit: int) -> tuple[int, ...]:
        """The units to gather while ``unit`` runs in an evaluation, which has no program."""
        if self.trace is None or not self.plan.overlap.gather or unit not in self.trace.needed:
            return ()
        position = self.trace.needed.index(unit) + 1
        if self.plan.prefetch_bytes is not None:
            return tuple(Lookahead(self.plan, self.infos).after(self.trace.needed, position, self.plan.prefetch))
        return self.trace.needed[position : position + self.plan.prefetch]

    # -- parts -------------------------------------------------------------------------------------------------

    def _trace_so_far(self) -> Trace:
        return self.trace or default_trace(self.infos, recompute=self.plan.recompute)

    def _tabulate(self, place: Place) -> Mapping[Moment | int, tuple[GatherBatch, ...]]:
        position, micro_batches = place
        forward, reached = self._trace_so_far().forward, 0
        table: dict[Moment | int, list[GatherBatch]] = {}
        for operation in self.program(micro_batches).operations:
            phase, unit, micro_batch = operation.start
            if operation.lane is not Lane.GATHER or micro_batch != position:
                continue
            moment: Moment | int = (phase, unit)
            if phase in (Phase.PRE_FORWARD, Phase.POST_FORWARD):
                # A unit that runs twice has two events of one name; gathers come in the order of their starts.
                moment = reached = forward.index((phase, unit), reached)
            if unit not in operation.units:
                batches = table.setdefault(moment, [])
                # Two gathers of a unit at once would write to one buffer.
                ahead = {key for batch in batches for key in batch.buffers}
                if keys := tuple(key for key in operation.buffers if key not in ahead):
                    batches.append(GatherBatch(keys, operation.axis is Axis.SECONDARY))
        return {moment: tuple(prefetches) for moment, prefetches in table.items()}

    def _retain(self, last: bool) -> Retention:
        trace = self._trace_so_far()
        chosen = retention(self.plan, self.infos, trace)
        # A backward frees what it needs, and what the forward has kept for it. What other code alone has gathered since
        # the unit's forward stays for the next micro-batch, which needs it first.
        freed = (chosen.kept | frozenset(trace.needed_again)) - (frozenset() if last else chosen.carried)
        return replace(chosen, carried=frozenset(trace.needed) - freed)

    def cut(self, trace: Trace, place: Place) -> Turns:
        """The reductions of a micro-batch with this order of units."""
        position, micro_batches = place

        def table(*, unit_by_unit: bool) -> Mapping[int, ReductionTurn]:
            program = self.program(micro_batches, trace=trace, unit_by_unit=unit_by_unit)
            return reduction_turns(program, position, [u for u in trace.reduction_order if self.infos[u].trainable])

        def late(unit: int) -> ReductionTurn:
            if unit not in trace.reduction_order:
                # The forward skipped the unit, but other code read its parameters.
                return self.cut(default_trace(self.infos, recompute=self.plan.recompute), place).late(unit)
            return table(unit_by_unit=True)[unit]

        return Turns(table(unit_by_unit=False), late)

    def _forget_tables(self) -> None:
        for made in (self.prefetches, self.retained, self.turns):
            made.cache_clear()
        for name in ("spreads", "updates", "update_order"):
            self.__dict__.pop(name, None)


class Schedule:
    """Follows one model through its steps.

    Attributes:
        backwards: Backwards of this step that have ended.
        micro_batch: Number of the current micro-batch.
        last: Whether the current micro-batch is the step's last.
        order: Hash of this step's events that must have the same order on all ranks.
        forward: Forward events of the current micro-batch so far.
        backward: Its backward events so far. Whoever sees that a unit's gradients are ready, that its input gradient is
            next, or that the backward has left the unit, appends an event, which moves no cursor.
    """

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self.backwards = 0
        self.micro_batch = 0
        self.last = True
        self._place = place_of(0, last=True)
        self._expected: tuple[int, ...] = ()  # the trace's units, in the order in which its backward needs them
        self.order = _OrderHash()
        # The current micro-batch: its events, units that its backward has needed, and whether it has deviated.
        self.forward: list[Moment] = []
        self._unrecorded: list[tuple[int, Moment]] = []  # of forwards without a graph: by position in the others
        self.backward: list[Moment] = []
        self._needed: list[int] = []
        self._deviated = False
        # Forward events of other micro-batches in a pipeline.
        self._parked: dict[int, tuple[list[Moment], list[tuple[int, Moment]]]] = {}
        self._reported = False  # whether the one warning about deviations was given
        # Where every rank holds whole parameters nothing is gathered, and ranks may run different units: all that must
        # be the same is the order of reductions and spreads. It changes when all ranks have run another trace alike.
        self._whole = not any_gathered(programs.plan, programs.infos)
        self._proposed: Trace | None = None
        self._trainable = {number for number, info in enumerate(programs.infos) if info.trainable}

    def restart(self, infos: Sequence[UnitInfo]) -> None:
        """Follow the programs of units of which other parameters are trained than before."""
        self.programs.restart(infos)
        self._expected, self._proposed = (), None
        self._trainable = {number for number, info in enumerate(infos) if info.trainable}

    def adopted_order(self) -> list[str]:
        """Names of units in the order in which forwards need them, where it is agreed; elsewhere, each backward follows
        its own forward."""
        trace = self.programs.trace if self._whole else None
        return [] if trace is None else [self.programs.infos[unit].name for unit in dict.fromkeys(trace.needed)]

    def resume(self, order: Sequence[str]) -> None:
        """Follow, from the next step on, the order that :meth:`adopted_order` gave, if it has the units that are
        trained here."""
        numbers = {info.name: number for number, info in enumerate(self.programs.infos)}
        if self._whole and order != self.adopted_order() and set(order) <= numbers.keys():
            units = [numbers[name] for name in order]
            if self._trainable <= set(units):
                forward = [(phase, unit) for unit in units for phase in (Phase.PRE_FORWARD, Phase.POST_FORWARD)]
                self.programs.adopt(Trace.of_forward(forward))

    def begin_forward(self) -> None:
        """Begin a forward of the model, or of a unit that is called alone."""
        if len(self.forward) + len(self._unrecorded) >= MOST_EVENTS:
            self.abandon_micro_batch()  # forwards that record graphs, or could, and never run backward
        if len(self.order.events) >= MOST_EVENTS:
            self.order.prefix, self.order.events = self.order.value, []  # a hash instead of a long list

    # -- events ------------------------------------------------------------------------------------------------

    def note_unrecorded(self, moment: Moment) -> None:
        """Note an event of a forward without a graph, which counts if the backward repeats the forward."""
        self._unrecorded.append((len(self.forward), moment))

    def forward_event(self, moment: Moment) -> tuple[GatherBatch, ...]:
        """Record that a unit's forward begins or ends; returns the gathers that the program starts now."""
        self.forward.append(moment)
        self.order.events.append(moment)
        trace = self.programs.trace
        if self._whole or trace is None or self._deviated:
            return ()
        position = len(self.forward) - 1
        if position >= len(trace.forward) or trace.forward[position] != moment:
            self._deviate()
            return ()
        return self.programs.prefetches(self._place).get(position, ())

    def backward_event(self, moment: Moment) -> tuple[GatherBatch, ...]:
        """Record that the backward needs a unit; returns the gathers that the program starts now."""
        unit = moment[1]
        if unit in self._needed:
            return ()
        position = len(self._needed)
        self._needed.append(unit)
        self.backward.append(moment)
        self.order.events.append(moment)
        if self.programs.trace is None or self._deviated or self._whole:
            return ()
        if position >= len(self._expected) or self._expected[position] != unit:
            self._deviate()
            return ()
        return self.programs.prefetches(self._place).get(moment, ())

    def end_backward(self) -> None:
        """Complete a micro-batch: adopt its trace if there is none yet, or if it differs from the adopted one."""
        self.backwards += 1
        if self._whole:
            ran = self._traced()
            if ran.forward and ran.backward and self._trainable <= {unit for _, unit in ran.forward}:
                self._proposed = ran
            self.abandon_micro_batch()
            return
        trace = None if self._deviated else self.programs.trace
        if trace is not None:
            if len(self.forward) == len(trace.forward) and len(self._needed) == len(self._expected):
                self.abandon_micro_batch()
                return
            if self.forward and self.backward:
                self._deviate()
        if self.forward and self.backward:
            self.programs.adopt(trace := self._traced())
            self._expected = trace.needed_again
        self.abandon_micro_batch()

    def _traced(self) -> Trace:
        forward = list(self.forward)
        for position, moment in reversed(self._unrecorded):
            if moment[1] in self._needed:
                forward.insert(position, moment)
        return Trace(tuple(forward), tuple(self.backward))

    def ranks_met(self, *, same_order: bool) -> None:
        """Adopt the order of this step where parameters are whole, if all ranks had the same."""
        proposed, self._proposed = self._proposed, None
        if same_order and proposed is not None and proposed != self.programs.trace:
            self.programs.adopt(proposed)

    def begin_micro_batch(self, number: int, *, last: bool) -> None:
        """Begin the micro-batch of a number, from 0, to which all following events belong; ``last`` says whether its
        backward is the step's last."""
        self.micro_batch, self.last, self._place = number, last, place_of(number, last=last)

    def select(self, number: int, *, last: bool) -> None:
        """Switch to another micro-batch of a pipeline, which has several in flight; see :meth:`begin_micro_batch`."""
        self._parked[self.micro_batch] = self.forward, self._unrecorded
        self.forward, self._unrecorded = self._parked.pop(number, ([], []))
        self.begin_micro_batch(number, last=last)

    def abandon_micro_batch(self) -> None:
        """Forget the events of the current micro-batch, for example because its backward failed."""
        self.forward.clear()
        self._unrecorded.clear()
        self.backward.clear()
        self._needed.clear()
        self._deviated = False

    def abandon(self) -> None:
        """Forget a forward that has had no backward when the step is taken."""
        self._parked.clear()
        self.abandon_micro_batch()
        self.order.prefix, self.order.events = 0, []
        self.backwards = 0

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Forget the forwards in this block that have no backward there. Ranks may run different ones."""
        before = self.backwards, self.micro_batch
        forward, unrecorded = list(self.forward), list(self._unrecorded)
        order, deviated = (self.order.prefix, list(self.order.events)), self._deviated
        try:
            yield
        finally:
            if before == (self.backwards, self.micro_batch):
                self.forward[:], self._unrecorded[:] = forward, unrecorded
                self.order.prefix, self.order.events = order
                self._deviated = deviated

    # -- what the program says ---------------------------------------------------------------------------------

    def turns(self) -> Turns:
        """The reductions of the current micro-batch, whose backward begins, in the reverse order of its forward."""
        trace = self.programs.trace
        follows = trace is not None and not self._deviated and len(self.forward) == len(trace.forward)
        if self._whole or follows or not self.forward:
            return self.programs.turns(self._place)
        return self.programs.cut(Trace.of_forward(self.forward), self._place)

    def retained(self) -> Retention:
        """Units that this micro-batch does not free; none before the first trace."""
        if self._whole or self.programs.trace is None or self._deviated:
            return _NOTHING
        return self.programs.retained(self.last)

    def _deviate(self) -> None:
        self._deviated = True
        if not self._reported:
            self._reported = True
            log.warning(
                "the order of units changed between micro-batches: such micro-batches gather on demand, without "
                "prefetch (reported once)"
            )


class _OrderHash:
    """A hash of events that depends on their order.

    Steps have the same events again and again, so the hash is computed when it is asked for, and only if the events
    differ from those of the step before.

    Attributes:
        events: The newest events; whoever notes an event appends it.
        prefix: Hash of earlier events of the step, which are not in the list any more; 0 for none.
    """

    def __init__(self) -> None:
        self.events: list[Moment] = []
        self.prefix = 0
        self._known: tuple[list[Moment], int, int] = ([], 0, 0)  # events, the hash before them, the hash after them

    @property
    def value(self) -> int:
        """The hash of all events."""
        events, prefix, value = self._known
        if prefix != self.prefix or events != self.events:
            value = self.prefix
            for phase, unit in self.events:
                value = (value * 1_000_003 + _CODES[phase] * 65_537 + unit + 1) & _MASK
            self._known = list(self.events), self.prefix, value
        return value
