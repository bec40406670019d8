"""The cursor: where this step is in the program, and what the program wants started there.

Correctness belongs to the units, which act on demand. The schedule only adds prefetch and order: step 0 runs on demand
and is recorded; from then on the program is lowered from the recorded trace, and hooks look up what to start. When
events stop following the trace (a conditional unit, two forwards before a backward) the rest of the micro-batch runs on
demand, the trace is taken anew, and the deviation is reported once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from thinwire.program import Lane, Phase, StepProgram, Trace, UnitInfo, lower
from thinwire.spec import Plan

__all__ = ["Schedule"]

log = logging.getLogger("thinwire")

MOST_EVENTS = 1 << 18
"""Forward events of one micro-batch that are remembered."""

Table = dict[tuple[Phase, int], tuple[int, ...]]
"""Units whose gathers start at an event of one micro-batch."""

_MASK = (1 << 62) - 1
_CODES = {phase: code for code, phase in enumerate(Phase, start=1)}


class Schedule:
    """Follows one model through its steps.

    Args:
        plan: the plan.
        infos: what the program knows of the units.
        rank: whose program.
    """

    def __init__(self, plan: Plan, infos: Sequence[UnitInfo], rank: int) -> None:
        self.plan, self.infos, self.rank = plan, infos, rank
        self.trace: Trace | None = None
        self._expected: tuple[int, ...] = ()
        self.order_hash = 0
        self.micro_batch = 0
        self.last = True
        self._programs: dict[tuple[Trace, int, bool], StepProgram] = {}
        self._tables: dict[tuple[int, int], Table] = {}
        self._kept: frozenset[int] = frozenset()
        self._forward: list[tuple[Phase, int]] = []
        self._parked: dict[int, list[tuple[Phase, int]]] = {}
        self._backward: list[tuple[Phase, int]] = []
        self._needed: list[int] = []
        self._deviated = False
        self._reported = False

    # -- events ------------------------------------------------------------------------------------------------

    def forward_event(self, phase: Phase, unit: int) -> tuple[int, ...]:
        """A unit's forward begins or ends; returns the units whose gather the program starts now."""
        if len(self._forward) >= MOST_EVENTS:
            self._restart()  # forwards that record graphs and never run backward
        position = len(self._forward)
        self._forward.append((phase, unit))
        self._hash(phase, unit)
        if self.trace is None or self._deviated:
            return ()
        if position >= len(self.trace.forward) or self.trace.forward[position] != (phase, unit):
            self._deviate()
            return ()
        return self._gathers(phase, unit)

    def backward_event(self, unit: int) -> tuple[int, ...]:
        """Backward needs a unit (again); returns the units whose gather the program starts now."""
        if unit in self._needed:
            return ()
        position = len(self._needed)
        self._needed.append(unit)
        self._backward.append((Phase.PRE_BACKWARD, unit))
        self._hash(Phase.PRE_BACKWARD, unit)
        if self.trace is None or self._deviated:
            return ()
        if position >= len(self._expected) or self._expected[position] != unit:
            self._deviate()
            return ()
        return self._gathers(Phase.PRE_BACKWARD, unit)

    def note_backward(self, phase: Phase, unit: int) -> None:
        """A unit's gradients exist, or backward has left it: part of the trace, though no cursor follows it."""
        self._backward.append((phase, unit))

    def note_evaluation(self, unit: int) -> None:
        """A gather of an evaluation: it moves no cursor, but ranks that gather different units must be found out."""
        self._hash(Phase.STEP, unit)

    def following(self, unit: int) -> tuple[int, ...]:
        """The units to gather while ``unit`` runs in an evaluation, which moves no cursor."""
        if self.trace is None or not self.plan.overlap.gather or unit not in self.trace.needed:
            return ()
        position = self.trace.needed.index(unit) + 1
        return self.trace.needed[position : position + self.plan.prefetch]

    def end_backward(self) -> None:
        """A micro-batch is complete: adopt its trace if there is none, or if it was another one."""
        complete = bool(self._forward) and bool(self._backward)
        if complete and not self._follows_trace():
            if self.trace is not None and not self._deviated:
                self._deviate()
            self._adopt(Trace(tuple(self._forward), tuple(self._backward)))
        self._restart()

    def select(self, micro_batch: int, *, last: bool) -> None:
        """Turn to a micro-batch of a pipeline, which has several under way: events belong to it from now on.

        Args:
            micro_batch: its number.
            last: whether its backward is the step's last.
        """
        self._parked[self.micro_batch] = self._forward
        self._forward = self._parked.pop(micro_batch, [])
        self.micro_batch, self.last = micro_batch, last

    def abandon_micro_batch(self) -> None:
        """A backward failed: its events are forgotten."""
        self._restart()

    def abandon(self) -> None:
        """A step is taken: a forward that never had a backward is forgotten."""
        self._parked.clear()
        self._restart()
        self.order_hash = 0

    def reduction_order(self) -> tuple[int, ...]:
        """Units in the order in which gradients are reduced: against the forward just seen, or the last trace."""
        if self._forward:
            return Trace(tuple(self._forward), ()).reduction_order
        if self.trace is not None:
            return self.trace.reduction_order
        return tuple(reversed(range(len(self.infos))))

    def kept(self) -> frozenset[int]:
        """Units that stay gathered between forward and backward, as far as known: none before the first trace."""
        return frozenset() if self._deviated else self._kept

    def spread_order(self) -> Sequence[int]:
        """Units in the order in which updated parameters are spread: as the forward needs them."""
        if self.trace is None:
            return range(len(self.infos))
        traced = tuple(dict.fromkeys(self.trace.needed))
        return (*traced, *(unit for unit in range(len(self.infos)) if unit not in traced))

    # -- the program -------------------------------------------------------------------------------------------

    def program(self, micro_batches: int, *, clip: bool = False) -> StepProgram:
        """The program for the present trace, lowered once."""
        assert self.trace is not None
        key = (self.trace, micro_batches, clip)
        if key not in self._programs:
            if len(self._programs) > 16:
                self._programs.clear()  # an ever-changing model: do not collect programs
            self._programs[key] = lower(
                self.plan, self.infos, micro_batches=micro_batches, trace=self.trace, rank=self.rank, clip=clip
            )
        return self._programs[key]

    def replan(self, plan: Plan) -> None:
        """Go by another plan, which differs in its codecs only."""
        self.plan = plan
        self._programs.clear()
        self._tables.clear()

    def _follows_trace(self) -> bool:
        """Whether the micro-batch needed the trace's units in its order, to the end."""
        if self.trace is None or self._deviated:
            return False
        return len(self._forward) == len(self.trace.forward) and len(self._needed) == len(self._expected)

    def _adopt(self, trace: Trace) -> None:
        self.trace, self._expected = trace, trace.needed_again
        self._tables.clear()
        self._kept = trace.tail if self.plan.keep_gathered == "last" else frozenset()

    def _gathers(self, phase: Phase, unit: int) -> tuple[int, ...]:
        # A program is keyed by first, middle or last micro-batch: three stand for any number.
        key = (0, 1 if self.last else 3) if self.micro_batch == 0 else (2 if self.last else 1, 3)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = self._tabulate(*key)
        return table.get((phase, unit), ())

    def _tabulate(self, position: int, micro_batches: int) -> Table:
        """Look every event of a micro-batch up in the program, once, so that hooks need not."""
        table: dict[tuple[Phase, int], list[int]] = {}
        for operation in self.program(micro_batches).operations:
            phase, unit, micro_batch = operation.start
            if operation.lane is Lane.GATHER and micro_batch == position and operation.units[0] != unit:
                table.setdefault((phase, unit), []).append(operation.units[0])
        return {event: tuple(dict.fromkeys(units)) for event, units in table.items()}

    # -- parts -------------------------------------------------------------------------------------------------

    def _deviate(self) -> None:
        self._deviated = True
        if not self._reported:
            self._reported = True
            log.warning(
                "the order of units changed between micro-batches: such micro-batches gather on demand, without "
                "prefetch (reported once)"
            )

    def _restart(self) -> None:
        self._forward.clear()
        self._backward.clear()
        self._needed.clear()
        self._deviated = False

    def _hash(self, phase: Phase, unit: int) -> None:
        self.order_hash = (self.order_hash * 1_000_003 + _CODES[phase] * 65_537 + unit + 1) & _MASK
