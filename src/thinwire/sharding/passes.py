"""The forward and backward passes of one model, as its hooks report them."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator

import torch
from torch.autograd import Variable

from thinwire.errors import UsageError
from thinwire.program import Moment, Phase
from thinwire.sharding.agreement import Agreements
from thinwire.sharding.holds import Holds, recomputing
from thinwire.sharding.lanes.lanes import Mark
from thinwire.sharding.reducer import Reducer
from thinwire.sharding.schedule import Schedule
from thinwire.sharding.sharded import ShardedModel

__all__ = ["BackwardPass", "Pass", "PassState", "Passes"]


class Pass(enum.Enum):
    """Which pass the model is in.

    ``enter_forward`` and ``leave_forward`` lead from ``IDLE`` to ``FORWARD`` and back. The first event of a backward
    leads to ``BACKWARD``, its end back to where it began: a model may run a backward inside its forward. After a
    backward that raised, it stays in ``BACKWARD`` until the next event outside of it.
    """

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class PassState:
    """Where a model's passes are.

    Args:
        num_units: units of the model.

    Attributes:
        inside: whether modules see the tensors that they compute with, not shares; follows ``present``.
        before: where the present backward began.
        at: the event that was reported last; for journals.
        began: for each unit, when its present forward or backward began; for timelines.
        had_backward: whether any backward has begun since the last step.
        waits_for_backward: whether a forward since the last step has recorded a graph.
    """

    def __init__(self, num_units: int) -> None:
        self.inside = False
        self._present = Pass.IDLE
        self.before = Pass.IDLE
        self.at: Moment = (Phase.STEP, -1)
        self.began: list[Mark] = [None] * num_units
        self.had_backward = False
        self.waits_for_backward = False

    @property
    def present(self) -> Pass:
        """Which pass the model is in."""
        return self._present

    @present.setter
    def present(self, present: Pass) -> None:
        self._present, self.inside = present, present is not Pass.IDLE

    def end_step(self) -> None:
        """A step was taken."""
        self.had_backward = self.waits_for_backward = False


class BackwardPass:
    """Turns the events of a backward into what units, reducer and schedule have to do.

    Args:
        state: where the model's passes are.
        sharded: the model.
        schedule: the cursor in its program.
        reducer: of its gradients.
        agreements: of its steps.
        holds: frees its units.

    Attributes:
        encodes_gradients: whether gradients are encoded in this step. ``None``: the plan's schedule depends on how far
            training is, and the caller has not said so yet.
        gradients_count: whether this rank's gradients count; if not, it has no data any more, and they are zero.
        after_last: called when a step's last backward has ended.
    """

    def __init__(
        self,
        state: PassState,
        sharded: ShardedModel,
        schedule: Schedule,
        reducer: Reducer,
        agreements: Agreements,
        holds: Holds,
    ) -> None:
        self._state, self._sharded, self._units, self._plan = state, sharded, sharded.units, sharded.plan
        self._schedule, self._reducer, self._agreements, self._holds = schedule, reducer, agreements, holds
        # For each unit, calls whose outputs backward has reached and whose inputs it has not.
        self._open_calls = [0] * len(self._units)
        self.encodes_gradients: bool | None = True if self._plan.wire.schedule == 1.0 else None
        self.gradients_count = True
        self.after_last: Callable[[], None] = _nothing

    def pre_backward(self, index: int, *, will_leave: bool) -> None:
        """Backward has reached a unit's outputs.

        Args:
            index: the unit.
            will_leave: whether its inputs need gradients, so that :meth:`post_backward` follows, or the end.
        """
        self._enter_backward()
        if will_leave:
            self._open_calls[index] += 1
        self.need(index)
        self._state.began[index] = self._sharded.lanes.mark()

    def gradient(self, index: int, slot: int, grad: torch.Tensor) -> None:
        """A parameter's gradient exists."""
        self._enter_backward()
        self._agreements.used.note(index, slot)
        if not self.gradients_count:
            grad = torch.zeros_like(grad)
        if self._reducer.collect(index, slot, grad):
            self._state.at = Phase.GRADS_READY, index
            self._schedule.note_backward(Phase.GRADS_READY, index)
            self._sharded.lanes.computed("backward", self._units[index].name, self._state.began[index])
            self._reducer.ready(index)
            # Frozen weights may be needed after the last gradient of a unit, but only on the way to its inputs.
            self._free_if_left(index)

    def post_backward(self, index: int) -> None:
        """Backward has left a unit by one of its calls: the gradients of that call's inputs exist."""
        self._open_calls[index] -= 1
        if index not in self._sharded.gradients or self._reducer.delivered(index):
            self._free_if_left(index)

    def forget_failed(self) -> None:
        """After a backward that raised, its end was never called: drop what it gathered and collected."""
        if self._state.present is not Pass.BACKWARD or recomputing():
            return
        self._state.present = self._state.before
        self._agreements.used.undo_backward()
        self._reducer.abort()
        self._schedule.abandon_micro_batch()
        self._open_calls = [0] * len(self._units)
        self._holds.release_reads()
        self._holds.free_all()

    def _enter_backward(self) -> None:
        if self._state.present is Pass.BACKWARD:
            return
        if self.encodes_gradients is None:
            raise UsageError(
                f"wire.schedule = {self._plan.wire.schedule} needs to know how far training is: call "
                "thinwire.progress(model, share) before each step, with the share of training that is done, 0 to 1"
            )
        self._state.before, self._state.present = self._state.present, Pass.BACKWARD
        self._state.had_backward = True
        self._holds.begin_backward()
        self._agreements.begin_backward()
        self._reducer.begin(self._schedule.turns(), last=self._schedule.last)
        Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._state.present = self._state.before
        self._state.at = Phase.BACKWARD_END, -1
        self._reducer.end()
        self._schedule.end_backward()
        self._open_calls = [0] * len(self._units)
        self._holds.end_backward()
        self._holds.free_all()
        if self._schedule.last:
            self.after_last()

    def need(self, index: int) -> None:
        """Backward needs a unit's parameters, to recompute its forward or to go through it."""
        self._state.at = Phase.PRE_BACKWARD, index
        unit = self._units[index]
        unit.start_gather(from_secondary=True)
        for prefetch in self._schedule.backward_event(index):
            self._units[prefetch.unit].start_gather(from_secondary=prefetch.from_secondary)
        unit.need(from_secondary=True)

    def _free_if_left(self, index: int) -> None:
        if self._open_calls[index] <= 0:
            self._state.at = Phase.POST_BACKWARD, index
            if self._holds.free(index):
                self._schedule.note_backward(Phase.POST_BACKWARD, index)


class Passes:
    """Turns the events of a forward, and reads outside of passes, into what units and schedule have to do.

    Args:
        sharded: the model.
        schedule: the cursor in its program.
        backward: the other direction.
        state: where the model's passes are.
        holds: frees its units.

    Attributes:
        state: the same.
        backward: the same.
        before_computing: called when somebody is about to compute with parameters.
        alone: number of the unit whose forward is the present pass, because it was called while the model's was not.
    """

    def __init__(
        self, sharded: ShardedModel, schedule: Schedule, backward: BackwardPass, state: PassState, holds: Holds
    ) -> None:
        self.state, self.backward = state, backward
        self._sharded, self._units, self._plan = sharded, sharded.units, sharded.plan
        self._schedule, self._holds = schedule, holds
        self.before_computing: Callable[[], None] = _nothing
        self._is_sharded = any(unit.sharded for unit in self._units)
        self.alone: int | None = None
        self._alone_depth = 0  # how often that unit has called itself

    def is_inside(self) -> bool:
        """Whether modules see the tensors that they compute with, and others shares; ``state.inside`` after a backward
        that raised is not to be trusted."""
        if self.state.present is Pass.BACKWARD:
            self.backward.forget_failed()
        return self.state.inside or self._holds.depth > 0 or recomputing()

    def reach_step(self) -> None:
        """The micro-batches of a step have run, or failed."""
        self.state.at = Phase.STEP, -1
        self.backward.forget_failed()

    def refuse_missing_backward(self) -> None:
        """Raise if the model's forward recorded a graph in this step, and no backward reached a parameter.

        Raises:
            UsageError: naming what may have happened.
        """
        if self.state.waits_for_backward and not self.state.had_backward:
            raise UsageError(
                "step() after a forward without a backward that reached the model's parameters: call loss.backward(), "
                "without inputs=, or run the forward under torch.no_grad(). Nothing was updated"
            )

    def enter_forward(self) -> None:
        """The model's forward begins."""
        if not recomputing():
            self.backward.forget_failed()
            if self._is_sharded and not self._holds.depth and torch._C._functorch.peek_interpreter_stack() is not None:
                raise UsageError(
                    "torch.func transforms and sharded parameters: their gradients call no hooks that would gather the "
                    "parameters again. Call the transform inside thinwire.full_parameters(model)"
                )
            self.before_computing()
            self.state.present = Pass.FORWARD

    def leave_forward(self) -> None:
        """The model's forward has ended, or failed."""
        if self.state.present is Pass.FORWARD:
            self.state.present = Pass.IDLE
        elif not recomputing():
            self.state.before = Pass.IDLE  # a backward inside it has failed
        if not torch.is_grad_enabled() and not recomputing():
            self._holds.release_reads(free=True)

    def pre_forward(self, index: int) -> None:
        """A unit's forward begins."""
        if recomputing():
            self.backward.need(index)
            return
        self.backward.forget_failed()
        if self.state.present is Pass.IDLE:
            self.alone = index
            self.enter_forward()
        if index == self.alone:
            self._alone_depth += 1
        unit, units = self._units[index], self._units
        if not torch.is_grad_enabled():
            if unit.sharded:
                self._schedule.note_evaluation(index)
            unit.start_gather(from_secondary=False)
            for upcoming in self._schedule.programs.following(index):
                units[upcoming].start_gather(from_secondary=False)
            unit.need(from_secondary=False)
            return
        self.state.at, self.state.waits_for_backward = (Phase.PRE_FORWARD, index), True
        reuse = self._plan.secondary_reuse
        unit.start_gather(from_secondary=reuse)
        for prefetch in self._schedule.forward_event(Phase.PRE_FORWARD, index):
            units[prefetch.unit].start_gather(from_secondary=prefetch.from_secondary)
        unit.need(from_secondary=reuse)
        self.state.began[index] = self._sharded.lanes.mark()

    def post_forward(self, index: int, *, will_hear: bool) -> None:
        """A unit's forward ends.

        Args:
            index: the unit.
            will_hear: whether backward will announce itself at this unit's outputs.
        """
        if recomputing() or self._holds.depth:
            return
        unit = self._units[index]
        if not torch.is_grad_enabled():
            self._holds.free(index)
            return
        self.state.at = Phase.POST_FORWARD, index
        self._sharded.lanes.computed("forward", unit.name, self.state.began[index])
        self._schedule.forward_event(Phase.POST_FORWARD, index)
        if not unit.sharded:
            return
        kept = index in self._schedule.kept() or not will_hear
        if not kept or self._plan.secondary_reuse:
            unit.keep_secondary()
        if not kept:
            self._holds.free(index)

    def leave_alone(self, index: int) -> None:
        """The forward of a unit has ended, or failed: if it was called by itself, so has the pass."""
        if index != self.alone:
            return
        self._alone_depth -= 1
        if not self._alone_depth:
            self.alone = None
            self.leave_forward()

    @contextlib.contextmanager
    def reading(self, index: int) -> Iterator[None]:
        """A unit's parameters are whole and up to date in this block, outside of passes. Collective."""
        if not recomputing():
            self.backward.forget_failed()
            self.before_computing()
        self._units[index].need(from_secondary=False)
        yield
        if self._units[index].sharded:
            self._holds.free(index)

    def read(self, index: int) -> None:
        """Somebody is about to read a unit's parameters, maybe outside its forward.

        What is sharded is gathered inside the model's forward and backward alone, which all ranks run alike.
        """
        unit = self._units[index]
        if not unit.sharded:
            unit.join_spread()
        elif self.state.present is Pass.FORWARD or recomputing():
            self._holds.read(index)
            unit.need(from_secondary=False)


def _nothing() -> None:
    """Nobody wants to know."""
