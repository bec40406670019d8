"""Tracks the forward passes of one model, and reads outside of passes, from the events that its hooks report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from thinwire.errors import UsageError
from thinwire.program import Phase
from thinwire.sharding.params.param_group import Unit, start_gathers
from thinwire.sharding.params.write_audit import WriteAudit
from thinwire.sharding.step.backward import BackwardPass, moments
from thinwire.sharding.step.pass_state import Pass
from thinwire.sharding.step.pinned_units import recomputing
from thinwire.sharding.step.sharded_model import ShardedModel
from thinwire.sharding.step.trace_cursor import Schedule

__all__ = ["Passes"]


class Passes:
    """Turns the events of a forward, and reads outside of passes, into actions of units and schedule.

    Args:
        sharded: The model.
        schedule: Cursor in the model's program.
        backward: Handles the events of backwards.
        state: State of the model's passes.
        audit: Detects writes to parameters inside a forward.
        before_computing: Called before parameters are used for computation.

    Attributes:
        state: State of the model's passes.
        backward: Handles the events of backwards.
        holds: Frees the model's units.
        audit: Detects writes to parameters inside a forward.
        root_unit: Number of the unit that was called outside of the model's forward, so that its own forward is the
            current pass; ``None`` otherwise.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        schedule: Schedule,
        backward: BackwardPass,
        audit: WriteAudit,
        before_computing: Callable[[], None],
    ) -> None:
        self.backward, self.audit, self._before_computing = backward, audit, before_computing
        self.state, self.holds = backward.state, backward.holds
        self._units, self._plan, self._lanes = sharded.units, sharded.plan, sharded.lanes
        self._schedule = schedule
        self._begins, self._ends = (moments(p, self._units) for p in (Phase.PRE_FORWARD, Phase.POST_FORWARD))
        self._is_sharded = any(unit.sharded for unit in self._units)
        self.root_unit: int | None = None
        self._root_depth = 0  # number of nested calls of that unit

    def is_inside(self) -> bool:
        """Whether modules see the tensors that they compute with rather than shares. Unlike ``state.inside``, the
        result is also right after a backward that raised."""
        if self.state.present is Pass.BACKWARD:
            self.backward.forget_failed()
        return self.state.inside or self.holds.depth > 0 or recomputing()

    def reach_step(self) -> None:
        """Handle the end of a step's micro-batches, which may have failed."""
        self.state.at = Phase.STEP, -1
        self.backward.forget_failed()
        self.backward.take_unreported()

    def refuse_missing_backward(self) -> None:
        """Refuse a step whose forward recorded a graph, if no backward has reached a parameter.

        Raises:
            UsageError: The backward is missing.
        """
        if self.state.waits_for_backward and not self.state.had_backward:
            raise UsageError(
                "step() after a forward without a backward that reached the model's parameters: call loss.backward(), "
                "without inputs=, or run the forward under torch.no_grad(). Nothing was updated"
            )

    def enter_forward(self) -> None:
        """Handle the beginning of the model's forward."""
        if not recomputing():
            self.backward.forget_failed()
            if self._is_sharded and not self.holds.depth and torch._C._functorch.peek_interpreter_stack() is not None:
                raise UsageError(
                    "torch.func transforms and sharded parameters: their gradients call no hooks that would gather the "
                    "parameters again. Call the transform inside thinwire.full_parameters(model)"
                )
            self._before_computing()
            self.holds.begin_forward()
            self._schedule.begin_forward()
            self.state.enter(Pass.FORWARD)
            self.state.is_plain = (
                self.root_unit is None
                and not self.holds.depth
                and not self.audit.compares_values
                and self._lanes.recorder.timeline is None
            )

    def leave_forward(self) -> None:
        """Handle the end of the model's forward, which may have failed."""
        if self.state.present is Pass.FORWARD:
            self.state.enter(Pass.IDLE)
        elif not recomputing():
            self.state.before = Pass.IDLE  # a backward inside this forward has failed
        if torch.is_grad_enabled():
            self.backward.may_be_unreported = True
        elif not recomputing():
            self.holds.release_reads(free=True)

    def note_plain(self, *, ends: bool) -> Callable[[int], bool]:
        """Create a function that notes the beginning or the end of the forward of a whole unit, if that is all there is
        to do. It returns whether it is; if not, call :meth:`pre_forward` or :meth:`post_forward`."""
        state, schedule, order, units = self.state, self._schedule, self._schedule.order, self._units
        moments = self._ends if ends else self._begins

        def note(index: int) -> bool:
            if not state.is_plain or not torch.is_grad_enabled() or recomputing():
                return False
            moment = state.at = moments[index]
            state.waits_for_backward = True
            if not (unit := units[index]).ready:
                unit.join_spread()
            schedule.forward.append(moment)
            order.events.append(moment)
            return True

        return note

    def pre_forward(self, index: int) -> None:
        """Handle the beginning of a unit's forward."""
        state = self.state
        if recomputing():
            self.backward.need(index)
            return
        if state.present is not Pass.FORWARD:
            self.backward.forget_failed()
            if state.present is Pass.IDLE:
                self.root_unit = index
                self.enter_forward()
        if index == self.root_unit:
            self._root_depth += 1
        unit = self._units[index]
        if not torch.is_grad_enabled():
            self._evaluate(unit)
            return
        moment = self._begins[index]
        state.at, state.waits_for_backward = moment, True
        if unit.sharded:
            reuse = self._plan.secondary_reuse
            unit.start_gather(from_secondary=reuse)
            start_gathers(self._units, self._schedule.forward_event(moment))
            unit.need(from_secondary=reuse)
        else:
            self._schedule.note_forward(moment)
            unit.join_spread()
        state.began[index] = self._lanes.mark() if self._lanes.recorder.timeline is not None else None

    def _evaluate(self, unit: Unit) -> None:
        """Prepare a unit for a forward without a backward."""
        if not unit.sharded:
            unit.join_spread()
            return
        self._schedule.order.events.append((Phase.STEP, unit.index))  # all ranks must gather the same units
        unit.start_gather(from_secondary=False)
        for upcoming in self._schedule.programs.following(unit.index):
            self._units[upcoming].start_gather(from_secondary=False)
        unit.need(from_secondary=False)

    def post_forward(self, index: int, *, will_hear: bool) -> None:
        """Handle the end of a unit's forward.

        Args:
            index: Number of the unit.
            will_hear: Whether a hook on the unit's outputs will report its backward.
        """
        if self.holds.depth or recomputing():
            return
        unit, state = self._units[index], self.state
        if not torch.is_grad_enabled():
            self.holds.free(index)
            return
        moment = state.at = self._ends[index]
        if (began := state.began[index]) is not None:
            self._lanes.computed("forward", unit.name, began)
            state.began[index] = None
        if not unit.sharded:
            self._schedule.note_forward(moment)
            return
        self._schedule.forward_event(moment)
        kept = index in self._schedule.retained().kept or not will_hear
        if not kept or self._plan.secondary_reuse:
            unit.keep_secondary()
        if not kept:
            self.holds.free(index)

    def leave_root_unit(self, index: int) -> None:
        """Handle the end of a unit's forward, which may have failed. It ends the pass if the unit was called alone."""
        if index != self.root_unit:
            return
        self._root_depth -= 1
        if not self._root_depth:
            self.root_unit = None
            self.leave_forward()

    @contextlib.contextmanager
    def reading(self, index: int) -> Iterator[None]:
        """Keep a unit's parameters whole and up to date in this block, outside of passes. Collective."""
        if not recomputing():
            self.backward.forget_failed()
            self._before_computing()
        self._units[index].need(from_secondary=False)
        yield
        if self._units[index].sharded:
            self.holds.free(index)

    def read(self, index: int) -> None:
        """Prepare a unit's parameters for a read, which may come from outside the unit's forward.

        Sharded units are gathered only inside the model's forward and backward, which run alike on all ranks.
        """
        unit = self._units[index]
        if not unit.sharded:
            unit.join_spread()
        elif self.state.present is Pass.FORWARD or recomputing():
            self.holds.read(index)
            unit.need(from_secondary=False)
