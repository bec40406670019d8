"""The cursor of a step: its position in the program, and the actions of the program at that position.

Units act on demand and are correct by themselves; this module adds prefetch, order and overlap. Step 0 runs on demand
and is recorded as a trace. From then on, the program is lowered from the trace, and hooks look up what to start. If
events deviate from the trace (a conditional unit, two forwards before a backward), the rest of the micro-batch gathers
on demand, and its reductions follow a program that is lowered from its own forward. The trace is then replaced, and the
deviation is reported once.
"""

from __future__ import annotations

import logging

from thinwire.program import Moment, Phase, Trace
from thinwire.sharding.grads.reducer import Turns
from thinwire.sharding.params.param_group import GatherBatch
from thinwire.sharding.step.program_tables import Programs, Retained, place_of

__all__ = ["Schedule"]

log = logging.getLogger("thinwire")

MOST_EVENTS = 1 << 18
"""Most forward events of one micro-batch to remember."""

_MASK = (1 << 62) - 1
_CODES = {phase: code for code, phase in enumerate(Phase, start=1)}


class Schedule:
    """Follows one model through its steps.

    Args:
        programs: Programs of the model.

    Attributes:
        backwards: Backwards of this step that have ended.
        micro_batch: Number of the current micro-batch.
        last: Whether the current micro-batch is the step's last.
        order: Hash of this step's events that must have the same order on all ranks.
        forward: Forward events of the current micro-batch so far; :meth:`note_forward` appends them.
        backward: Its backward events so far; :meth:`note_backward` appends them.
    """

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self.backwards = 0
        self.micro_batch = 0
        self.last = True
        self._expected: tuple[int, ...] = ()  # the trace's units, in the order in which its backward needs them
        self.order = _OrderHash()
        # The current micro-batch: its events, units that its backward has needed, and whether it has deviated.
        self.forward: list[Moment] = []
        self.backward: list[Moment] = []
        self._needed: list[int] = []
        self._deviated = False
        self._parked: dict[int, list[Moment]] = {}  # forward events of other micro-batches in a pipeline
        self._reported = False  # whether the one warning about deviations was given
        # Where every rank holds whole parameters nothing is gathered, and ranks may run different units: all that must
        # be the same is the order of reductions and spreads. It changes when all ranks have run another trace alike.
        self._whole = programs.plan.params.ranks == 1
        self._proposed: Trace | None = None
        self._trainable = {number for number, info in enumerate(programs.infos) if info.trainable}

    def begin_forward(self) -> None:
        """Begin a forward of the model, or of a unit that is called alone."""
        if len(self.forward) >= MOST_EVENTS:
            self.abandon_micro_batch()  # forwards that record graphs and never run backward
        self.order.shorten()

    # -- events ------------------------------------------------------------------------------------------------

    def note_forward(self, moment: Moment) -> None:
        """Record that a unit's forward begins or ends."""
        self.forward.append(moment)
        self.order.events.append(moment)

    def forward_event(self, moment: Moment) -> tuple[GatherBatch, ...]:
        """Record that a unit's forward begins or ends; returns the gathers that the program starts now."""
        self.note_forward(moment)
        trace = self.programs.trace
        if trace is None or self._deviated or self._whole:
            return ()
        position = len(self.forward) - 1
        if position >= len(trace.forward) or trace.forward[position] != moment:
            self._deviate()
            return ()
        return self.programs.prefetches(place_of(self.micro_batch, last=self.last), moment)

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
        return self.programs.prefetches(place_of(self.micro_batch, last=self.last), moment)

    def note_backward(self, moment: Moment) -> None:
        """Record in the trace that a unit's gradients are ready, that its input gradient is next, or that the backward
        has left it; moves no cursor."""
        self.backward.append(moment)

    def end_backward(self) -> None:
        """Complete a micro-batch: adopt its trace if there is none yet, or if it differs from the adopted one."""
        self.backwards += 1
        if self._whole:
            if self.forward and self.backward and self._trainable <= {unit for _, unit in self.forward}:
                self._proposed = Trace(tuple(self.forward), tuple(self.backward))
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
            trace = Trace(tuple(self.forward), tuple(self.backward))
            self.programs.adopt(trace)
            self._expected = trace.needed_again
        self.abandon_micro_batch()

    def ranks_met(self, *, same_order: bool) -> None:
        """Adopt the order of this step where parameters are whole, if all ranks had the same.

        Args:
            same_order: Whether the events of the step were the same on every rank.
        """
        proposed, self._proposed = self._proposed, None
        if same_order and proposed is not None and proposed != self.programs.trace:
            self.programs.adopt(proposed)

    def begin_micro_batch(self, number: int, *, last: bool) -> None:
        """Begin a micro-batch, to which all following events belong.

        Args:
            number: Number of the micro-batch, from 0.
            last: Whether its backward is the step's last.
        """
        self.micro_batch, self.last = number, last

    def select(self, number: int, *, last: bool) -> None:
        """Switch to another micro-batch of a pipeline, which has several in flight; see :meth:`begin_micro_batch` for
        the arguments."""
        self._parked[self.micro_batch] = self.forward
        self.forward = self._parked.pop(number, [])
        self.begin_micro_batch(number, last=last)

    def abandon_micro_batch(self) -> None:
        """Forget the events of the current micro-batch, for example because its backward failed."""
        self.forward.clear()
        self.backward.clear()
        self._needed.clear()
        self._deviated = False

    def abandon(self) -> None:
        """Forget a forward that has had no backward when the step is taken."""
        self._parked.clear()
        self.abandon_micro_batch()
        self.order.reset()
        self.backwards = 0

    # -- what the program says ---------------------------------------------------------------------------------

    def turns(self) -> Turns:
        """The reductions of the current micro-batch, whose backward begins, in the reverse order of its forward."""
        trace, place = self.programs.trace, place_of(self.micro_batch, last=self.last)
        if self._whole:
            return self.programs.turns(place)
        if trace is not None and not self._deviated and len(self.forward) == len(trace.forward):
            return self.programs.turns(place)
        return self.programs.turns(place, self.forward)

    def retained(self) -> Retained:
        """Units that this micro-batch does not free; none before the first trace."""
        if self._whole or self.programs.trace is None or self._deviated:
            return Retained()
        return self.programs.retained(last=self.last)

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
    """

    def __init__(self) -> None:
        self.events: list[Moment] = []
        self._prefix = 0  # hash of earlier events of the step, which are not in the list any more
        self._known: tuple[list[Moment], int, int] = ([], 0, 0)  # events, the hash before them, the hash after them

    def shorten(self) -> None:
        """Replace a long list of events by its hash."""
        if len(self.events) >= MOST_EVENTS:
            self._prefix, self.events = self.value, []

    def reset(self) -> None:
        """Forget all events."""
        self._prefix, self.events = 0, []

    @property
    def value(self) -> int:
        """The hash of all events."""
        events, prefix, value = self._known
        if prefix != self._prefix or events != self.events:
            value = self._prefix
            for phase, unit in self.events:
                value = (value * 1_000_003 + _CODES[phase] * 65_537 + unit + 1) & _MASK
            self._known = list(self.events), self._prefix, value
        return value
