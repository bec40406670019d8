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

__all__ = ["Pass", "Passes"]


class Pass(enum.Enum):
    """Which pass the model is in.

    ``enter_forward`` and ``leave_forward`` lead from ``IDLE`` to ``FORWARD`` and back. The first event of a backward
    leads to ``BACKWARD``, its end back to where it began: a model may run a backward inside its forward. After a
    backward that raised, it stays in ``BACKWARD`` until the next event outside of it.
    """

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class Passes:
    """Turns the events of a pass into what units, reducer and schedule have to do.

    Args:
        sharded: the model.
        schedule: the cursor in its program.
        reducer: of its gradients.
        agreements: of its steps.
        holds: frees its units.
    """

    def __init__(
        self, sharded: ShardedModel, schedule: Schedule, reducer: Reducer, agreements: Agreements, holds: Holds
    ) -> None:
        self._sharded, self._units, self._plan = sharded, sharded.units, sharded.plan
        self._schedule, self._reducer, self._agreements, self._holds = schedule, reducer, agreements, holds
        self.inside = False  # whether modules see the tensors that they compute with; follows ``present``
        self._present = Pass.IDLE
        self._before = Pass.IDLE  # where the present backward began
        # A unit whose forward was called while the model's was not, and how often it has called itself since.
        self._alone: int | None = None
        self._alone_depth = 0
        self.before_computing: Callable[[], None] = _nothing  # somebody is about to compute with parameters
        self.after_last_backward: Callable[[], None] = _nothing  # a step's gradients are on their way
        self.at: Moment = (Phase.STEP, -1)  # the event that was reported last; for journals
        # For each unit, calls whose outputs backward has reached and whose inputs it has not.
        self._open_calls = [0] * len(self._units)
        self.gradients_count = True  # or this rank has no data any more, and its gradients are zero
        self._had_backward = False  # whether any backward has begun since the last step
        # For each unit, when its present forward or backward began; for timelines.
        self._began: list[Mark] = [None] * len(self._units)
        # Whether gradients are encoded in this step. ``None``: the plan's schedule depends on how far training is, and
        # the caller has not said so yet.
        self.encodes_gradients: bool | None = True if self._plan.wire.schedule == 1.0 else None

    @property
    def present(self) -> Pass:
        """Which pass the model is in."""
        return self._present

    @present.setter
    def present(self, present: Pass) -> None:
        self._present, self.inside = present, present is not Pass.IDLE

    def is_inside(self) -> bool:
        """Whether modules see the tensors that they compute with, and others shares; ``inside`` after a backward that
        raised is not to be trusted."""
        if self.inside and self._present is Pass.BACKWARD:
            self.forget_failed_backward()
        return self.inside or self._holds.depth > 0 or recomputing()

    def end_step(self) -> None:
        """A step was taken."""
        self._had_backward = False

    def reach_step(self) -> None:
        """The micro-batches of a step have run, or failed."""
        self.at = Phase.STEP, -1
        self.forget_failed_backward()

    def refuse_missing_backward(self) -> None:
        """Raise if the model's forward recorded a graph in this step, and no backward reached a parameter.

        Raises:
            UsageError: naming what may have happened.
        """
        if self._schedule.is_forward_waiting() and not self._had_backward:
            raise UsageError(
                "step() after a forward without a backward that reached the model's parameters: call loss.backward(), "
                "without inputs=, or run the forward under torch.no_grad(). Nothing was updated"
            )

    # -- forward -----------------------------------------------------------------------------------------------

    def enter_forward(self) -> None:
        """The model's forward begins."""
        if not recomputing():
            self.forget_failed_backward()
            self.before_computing()
            self.present = Pass.FORWARD

    def leave_forward(self) -> None:
        """The model's forward has ended, or failed."""
        if self.present is Pass.FORWARD:
            self.present = Pass.IDLE
        elif not recomputing():
            self._before = Pass.IDLE  # a backward inside it has failed
        if not torch.is_grad_enabled() and not recomputing():
            self._holds.release_reads(free=True)

    def pre_forward(self, index: int) -> None:
        """A unit's forward begins."""
        if recomputing():
            self._need_in_backward(index)
            return
        self.forget_failed_backward()
        if self._present is Pass.IDLE:
            self._alone = index
            self.enter_forward()
        if index == self._alone:
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
        self.at = Phase.PRE_FORWARD, index
        reuse = self._plan.secondary_reuse
        unit.start_gather(from_secondary=reuse)
        for prefetch in self._schedule.forward_event(Phase.PRE_FORWARD, index):
            units[prefetch.unit].start_gather(from_secondary=prefetch.from_secondary)
        unit.need(from_secondary=reuse)
        self._began[index] = self._sharded.lanes.mark()

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
        self.at = Phase.POST_FORWARD, index
        self._sharded.lanes.computed("forward", unit.name, self._began[index])
        self._schedule.forward_event(Phase.POST_FORWARD, index)
        if not unit.sharded:
            return
        kept = index in self._schedule.kept() or not will_hear
        if not kept or self._plan.secondary_reuse:
            unit.keep_secondary()
        if not kept:
            self._holds.free(index)

    def is_alone(self, index: int) -> bool:
        """Whether the present pass is the forward of this unit, called by itself."""
        return self._alone == index

    def leave_alone(self, index: int) -> None:
        """The forward of a unit has ended, or failed: if it was called by itself, so has the pass."""
        if index != self._alone:
            return
        self._alone_depth -= 1
        if not self._alone_depth:
            self._alone = None
            self.leave_forward()

    @contextlib.contextmanager
    def reading(self, index: int) -> Iterator[None]:
        """A unit's parameters are whole and up to date in this block, outside of passes. Collective."""
        if not recomputing():
            self.forget_failed_backward()
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
        elif self.present is Pass.FORWARD or recomputing():
            self._holds.read(index)
            unit.need(from_secondary=False)

    # -- backward ----------------------------------------------------------------------------------------------

    def pre_backward(self, index: int, *, will_leave: bool) -> None:
        """Backward has reached a unit's outputs.

        Args:
            index: the unit.
            will_leave: whether its inputs need gradients, so that :meth:`post_backward` follows, or the end.
        """
        self._enter_backward()
        if will_leave:
            self._open_calls[index] += 1
        self._need_in_backward(index)
        self._began[index] = self._sharded.lanes.mark()

    def gradient(self, index: int, slot: int, grad: torch.Tensor) -> None:
        """A parameter's gradient exists."""
        self._enter_backward()
        self._agreements.note_gradient(index, slot)
        if not self.gradients_count:
            grad = torch.zeros_like(grad)
        if self._reducer.collect(index, slot, grad):
            self.at = Phase.GRADS_READY, index
            self._schedule.note_backward(Phase.GRADS_READY, index)
            self._sharded.lanes.computed("backward", self._units[index].name, self._began[index])
            self._reducer.ready(index)
            # Frozen weights may be needed after the last gradient of a unit, but only on the way to its inputs.
            self._free_if_left(index)

    def post_backward(self, index: int) -> None:
        """Backward has left a unit by one of its calls: the gradients of that call's inputs exist."""
        self._open_calls[index] -= 1
        if index not in self._sharded.gradients or self._reducer.delivered(index):
            self._free_if_left(index)

    def forget_failed_backward(self) -> None:
        """After a backward that raised, its end was never called: drop what it gathered and collected."""
        if self.present is not Pass.BACKWARD or recomputing():
            return
        self.present = self._before
        self._agreements.undo_backward()
        self._reducer.abort()
        self._schedule.abandon_micro_batch()
        self._open_calls = [0] * len(self._units)
        self._holds.release_reads()
        self._holds.free_all()

    def _enter_backward(self) -> None:
        if self.present is Pass.BACKWARD:
            return
        if self.encodes_gradients is None:
            raise UsageError(
                f"wire.schedule = {self._plan.wire.schedule} needs to know how far training is: call "
                "thinwire.progress(model, share) before each step, with the share of training that is done, 0 to 1"
            )
        self._before, self.present = self.present, Pass.BACKWARD
        self._had_backward = True
        self._holds.begin_backward()
        self._agreements.begin_backward()
        self._reducer.begin(self._schedule.turns(), last=self._schedule.last)
        Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self.present = self._before
        self.at = Phase.BACKWARD_END, -1
        self._reducer.end()
        self._schedule.end_backward()
        self._open_calls = [0] * len(self._units)
        self._holds.end_backward()
        self._holds.free_all()
        if self._schedule.last:
            self.after_last_backward()

    def _need_in_backward(self, index: int) -> None:
        self.at = Phase.PRE_BACKWARD, index
        unit = self._units[index]
        unit.start_gather(from_secondary=True)
        for prefetch in self._schedule.backward_event(index):
            self._units[prefetch.unit].start_gather(from_secondary=prefetch.from_secondary)
        unit.need(from_secondary=True)

    def _free_if_left(self, index: int) -> None:
        if self._open_calls[index] <= 0:
            self.at = Phase.POST_BACKWARD, index
            if self._holds.free(index):
                self._schedule.note_backward(Phase.POST_BACKWARD, index)


def _nothing() -> None:
    """Nobody wants to know."""
