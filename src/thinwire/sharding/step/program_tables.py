"""The programs that a runtime performs, and the tables in which hooks look up their actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from thinwire.program import (
    UNDER_WAY,
    Axis,
    Event,
    Lane,
    Lookahead,
    Moment,
    Operation,
    Phase,
    ReductionTurn,
    StepProgram,
    Trace,
    UnitInfo,
    default_trace,
    lower,
    reduction_turns,
)
from thinwire.sharding.grads.reducer import Turns
from thinwire.sharding.params.param_group import GatherBatch
from thinwire.spec import Plan

__all__ = ["Place", "Programs", "Retained", "place_of"]

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


class Retained(NamedTuple):
    """Units that a micro-batch does not free.

    Attributes:
        kept: Units that stay gathered from its forward to its backward.
        carried: Units that stay gathered from its backward to the next forward.
    """

    kept: frozenset[int] = frozenset()
    carried: frozenset[int] = frozenset()


class Programs:
    """The programs of one model, each lowered once, and lookup tables for hooks.

    Args:
        plan: The plan.
        infos: Descriptions of the units.
        position: Position in the mesh of the rank that performs the programs.

    Attributes:
        trace: Order of units that the tables follow; ``None`` before the end of the first micro-batch.
    """

    def __init__(self, plan: Plan, infos: Sequence[UnitInfo], position: int) -> None:
        self.plan, self.infos, self.position = plan, infos, position
        self.trace: Trace | None = None
        self._programs: dict[tuple[Trace, int, bool, bool, tuple[int, ...]], StepProgram] = {}
        # Tables for the trace, by place; see the methods of these names.
        self._prefetches: dict[Place, Mapping[Moment, tuple[GatherBatch, ...]]] = {}
        self._turns: dict[Place, Turns] = {}
        self._spreads: dict[tuple[int, ...], list[tuple[Operation, bool]]] | None = None
        self._retained: dict[bool, Retained] = {}
        self._update_order: tuple[int, ...] | None = None

    def program(
        self,
        micro_batches: int,
        *,
        clip: bool = False,
        trace: Trace | None = None,
        unit_by_unit: bool = False,
        fragments: tuple[int, ...] = (),
    ) -> StepProgram:
        """The program of a step.

        Args:
            micro_batches: Forward and backward passes per step.
            clip: Whether ranks add up the gradient norm.
            trace: Order of units; default: the adopted trace.
            unit_by_unit: Whether every unit is reduced in a bucket of its own.
            fragments: Fragments that the step begins to exchange with other islands.
        """
        trace = trace or self._trace_so_far()
        key = (trace, micro_batches, clip, unit_by_unit, fragments)
        if key not in self._programs:
            if len(self._programs) >= MOST_PROGRAMS:
                self._programs.clear()
            plan = _bucketed(self.plan, unit_by_unit=unit_by_unit)
            self._programs[key] = lower(
                plan,
                self.infos,
                micro_batches=micro_batches,
                trace=trace,
                position=self.position,
                clip=clip,
                fragments=fragments,
            )
        return self._programs[key]

    def adopt(self, trace: Trace) -> None:
        """Follow another trace from now on."""
        self.trace = trace
        self._forget_tables()

    def replan(self, plan: Plan) -> None:
        """Switch to a plan that differs only in its codecs."""
        self.plan = plan
        self._programs.clear()
        self._forget_tables()

    # -- what the program says ---------------------------------------------------------------------------------

    def prefetches(self, place: Place, moment: Moment) -> tuple[GatherBatch, ...]:
        """The gathers that an event of the trace starts for later."""
        table = self._prefetches.get(place)
        if table is None:
            table = self._prefetches[place] = self._tabulate(place)
        return table.get(moment, ())

    def turns(self, place: Place, forward: Sequence[Moment] = ()) -> Turns:
        """The reductions of a micro-batch.

        Args:
            place: Representative of the micro-batch.
            forward: Forward events of the micro-batch; default: those of the trace.
        """
        if forward:
            return self._cut(Trace.of_forward(forward), place)
        if place not in self._turns:
            self._turns[place] = self._cut(self._trace_so_far(), place)
        return self._turns[place]

    def spreads(self) -> Mapping[tuple[int, ...], Sequence[tuple[Operation, bool]]]:
        """The spreads of updated parameters, by the units that travel together, in the order in which the forward needs
        the units; each with a flag that is true if the step waits for it."""
        if self._spreads is None:
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
            self._spreads = {tuple(units): operations for units, operations in batches}
        return self._spreads

    def retained(self, *, last: bool) -> Retained:
        """Units that a micro-batch does not free.

        Args:
            last: Whether the micro-batch is the step's last.
        """
        if last not in self._retained:
            program, trace = self.program(1 if last else 2), self._trace_so_far()
            frees = [(event.phase, units) for event, units in program.frees.items() if event.micro_batch == 0]
            freed = {(phase, unit) for phase, units in frees for unit in units}
            in_backward = {unit for phase, unit in freed if phase is not Phase.POST_FORWARD}
            self._retained[last] = Retained(
                frozenset(unit for unit in trace.needed if (Phase.POST_FORWARD, unit) not in freed),
                frozenset(unit for unit in trace.needed if unit not in in_backward),
            )
        return self._retained[last]

    def update_order(self) -> tuple[int, ...]:
        """Units in the order in which their gradients arrive; units that the forward skipped come first."""
        if self._update_order is None:
            traced = self._trace_so_far().reduction_order
            self._update_order = (*(u for u in reversed(range(len(self.infos))) if u not in traced), *traced)
        return self._update_order

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

    def _tabulate(self, place: Place) -> Mapping[Moment, tuple[GatherBatch, ...]]:
        position, micro_batches = place
        table: dict[Moment, list[GatherBatch]] = {}
        for operation in self.program(micro_batches).operations:
            phase, unit, micro_batch = operation.start
            if operation.lane is Lane.GATHER and micro_batch == position and unit not in operation.units:
                batches = table.setdefault((phase, unit), [])
                # A unit that a micro-batch needs twice has two events of one name, which may gather the same unit; two
                # gathers at once would write to one buffer.
                ahead = {key for batch in batches for key in batch.buffers}
                if keys := tuple(key for key in operation.buffers if key not in ahead):
                    batches.append(GatherBatch(keys, operation.axis is Axis.SECONDARY))
        return {moment: tuple(prefetches) for moment, prefetches in table.items()}

    def _cut(self, trace: Trace, place: Place) -> Turns:
        position, micro_batches = place

        def table(*, unit_by_unit: bool) -> Mapping[int, ReductionTurn]:
            program = self.program(micro_batches, trace=trace, unit_by_unit=unit_by_unit)
            return reduction_turns(program, position, [u for u in trace.reduction_order if self.infos[u].trainable])

        def late(unit: int) -> ReductionTurn:
            if unit not in trace.reduction_order:
                # The forward skipped the unit, but other code read its parameters.
                return self._cut(default_trace(self.infos, recompute=self.plan.recompute), place).late(unit)
            return table(unit_by_unit=True)[unit]

        return Turns(table(unit_by_unit=False), late)

    def _forget_tables(self) -> None:
        self._prefetches.clear()
        self._turns.clear()
        self._retained.clear()
        self._spreads = self._update_order = None


def _bucketed(plan: Plan, *, unit_by_unit: bool) -> Plan:
    """The plan, or the same with a bucket for every unit."""
    return plan.model_copy(update={"bucket_bytes": 1, "reduce_bytes": 0}) if unit_by_unit else plan
