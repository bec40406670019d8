"""Tracks the backward passes of one model, from the events that its hooks report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch.autograd import Variable

from thinwire.errors import UsageError
from thinwire.program import Moment, Phase
from thinwire.sharding.grads.reducer import Reducer
from thinwire.sharding.params.param_group import Unit, start_gathers
from thinwire.sharding.step.pass_state import Pass, PassState
from thinwire.sharding.step.pinned_units import Holds, recomputing
from thinwire.sharding.step.sharded_model import ShardedModel
from thinwire.sharding.step.step_check import StepCheck, UsedGradients
from thinwire.sharding.step.trace_cursor import Schedule

__all__ = ["BackwardPass", "Delivery", "moments"]


_MOST_TAKEN: Final = 1 << 17
"""Most elements of gradients that wait to be given to the reducer."""


class Delivery(ABC):
    """What takes the gradients of one unit's trained parameters from autograd."""

    @abstractmethod
    def has_left(self) -> bool:
        """Whether autograd has left gradients in place."""

    @abstractmethod
    def end_backward(self) -> None:
        """Deliver what waits for other gradients of the unit, and what autograd has left."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what waits for other gradients of the unit, and what autograd has left."""


class _TakenGradients:
    """Gradients of small units that were taken from autograd, until they are given to the reducer together: its code
    then runs for several units at once, while it is in the processor's cache.

    Args:
        reducer: Reducer of the model's gradients.
        used: Flags of the parameters that have gradients.
    """

    def __init__(self, reducer: Reducer, used: UsedGradients) -> None:
        self._reducer, self._used = reducer, used
        self._sizes = {unit: sum(p.layout.numel for p in parts) for unit, parts in reducer.gradients.items()}
        self.units: dict[int, list[torch.Tensor]] = {}
        self._elements = 0

    def put(self, unit: int, grads: list[torch.Tensor]) -> None:
        """Take the gradients of all trained parameters of a unit, in order."""
        if unit in self.units:
            self.flush()  # gradients that come again are added to the first ones
        self.units[unit] = grads
        self._elements += self._sizes[unit]
        if self._elements > _MOST_TAKEN or not self._reducer.may_wait(unit):
            self.flush()

    def delivered(self, unit: int) -> bool:
        """Whether every trained parameter of a unit has delivered its gradient in this backward."""
        return unit in self.units or self._reducer.delivered(unit)

    def flush(self) -> None:
        """Give all gradients to the reducer, and mark their units as complete."""
        units, self.units, self._elements = self.units, {}, 0
        for unit, grads in units.items():
            self._used.note_all(unit)
            self._reducer.take_whole(unit, grads)

    def drop(self) -> None:
        """Drop all gradients."""
        self.units, self._elements = {}, 0


class BackwardPass:
    """Turns the events of a backward into actions of units, reducer and schedule.

    Args:
        state: State of the model's passes.
        sharded: The model.
        schedule: Cursor in the model's program.
        reducer: Reducer of the model's gradients.
        step_check: Exchanges of the model's steps.
        holds: Frees the model's units.
        after_last: Called after a step's last backward.

    Attributes:
        state: State of the model's passes.
        holds: Frees the model's units.
        encodes_gradients: Whether gradients are encoded in this step; ``None`` if that depends on the progress of
            training, which the caller has not reported yet.
        gradients_count: Whether this rank's gradients count. If not, the rank has run out of data, and its gradients
            are zero.
        deliveries: What takes the gradients of each trained unit from autograd.
        may_be_unreported: Whether a backward may have ended of which no event was reported, because it has reached only
            parameters without hooks: a forward has recorded a graph, and no backward has ended since.
    """

    def __init__(
        self,
        state: PassState,
        sharded: ShardedModel,
        schedule: Schedule,
        reducer: Reducer,
        step_check: StepCheck,
        holds: Holds,
        after_last: Callable[[], None],
    ) -> None:
        self._after_last = after_last
        self.state, self._sharded, self._units, self._plan = state, sharded, sharded.units, sharded.plan
        self._schedule, self._reducer, self._step_check, self.holds = schedule, reducer, step_check, holds
        self._lanes, self._is_sharded = sharded.lanes, any(unit.sharded for unit in sharded.units)
        # For each unit, the number of calls with outputs that backward has reached and inputs that it has not.
        self._open_calls = [0] * len(self._units)
        self.encodes_gradients: bool | None = True if self._plan.wire.schedule == 1.0 else None
        self.gradients_count = True
        self.deliveries: list[Delivery] = []
        self._taken = _TakenGradients(reducer, step_check.used)
        self.may_be_unreported = False
        self._needed, self._grads_ready = (moments(p, self._units) for p in (Phase.PRE_BACKWARD, Phase.GRADS_READY))

    def pre_backward(self, index: int, *, will_leave: bool) -> None:
        """Handle a backward that reaches a unit's outputs.

        Args:
            index: Number of the unit.
            will_leave: Whether the unit stays open until :meth:`post_backward` or the end of the backward.
        """
        self.begin()
        if will_leave:
            self._open_calls[index] += 1
        self.need(index)
        self.state.began[index] = self._lanes.mark() if self._lanes.recorder.timeline is not None else None

    def all_gradients(self, index: int, grads: list[torch.Tensor]) -> None:
        """Take the gradients of all trained parameters of a unit, in order."""
        state = self.state
        moment = state.at = self._grads_ready[index]
        self._schedule.backward.append(moment)
        if (began := state.began[index]) is not None:
            self._lanes.computed("backward", self._units[index].name, began)
        if not self.gradients_count:
            grads = [torch.zeros_like(grad) for grad in grads]
        self._taken.put(index, grads)
        if self._is_sharded:
            self._free_if_left(index)

    def collect(self, index: int, slot: int, grad: torch.Tensor) -> bool:
        """Take the gradient of a unit's trained parameter number ``slot``, in the parameter's shape, by itself; returns
        whether the unit is now complete."""
        self._taken.flush()
        self._step_check.used.note(index, slot)
        return self._reducer.collect(index, slot, grad if self.gradients_count else torch.zeros_like(grad))

    def gradients_ready(self, index: int) -> None:
        """Handle the last gradient of a unit."""
        moment = self._grads_ready[index]
        self.state.at = moment
        self._schedule.note_backward(moment)
        if (began := self.state.began[index]) is not None:
            self._lanes.computed("backward", self._units[index].name, began)
        self._reducer.ready(index)
        # After the last gradient of a unit, frozen weights are needed only on the way to the unit's inputs.
        self._free_if_left(index)

    def expect_input_gradient(self, index: int) -> None:
        """Handle the gradients of a unit's parameters that come before that of its input: the unit stays open until
        :meth:`post_backward` or the end of the backward."""
        self.begin()
        self._open_calls[index] += 1

    def input_gradient(self, index: int) -> None:
        """Handle a backward that computes the gradient of a unit's input next."""
        if self._taken.delivered(index):
            moment = self.state.at = Phase.INPUT_GRADIENT, index
            self._schedule.note_backward(moment)

    def post_backward(self, index: int) -> None:
        """Handle a backward that leaves one call of a unit, because the gradients of the call's inputs exist."""
        self._open_calls[index] -= 1
        if index not in self._sharded.gradients or self._taken.delivered(index):
            self._free_if_left(index)

    def forget_failed(self) -> None:
        """Clean up after a backward that raised: drop the parameters it gathered and the gradients it collected."""
        if self.state.present is not Pass.BACKWARD or recomputing():
            return
        self.state.enter(self.state.before)
        self._step_check.used.undo_backward()
        for unit in self.deliveries:
            unit.forget()
        self._taken.drop()
        self._reducer.abort()
        self._schedule.abandon_micro_batch()
        self._open_calls = [0] * len(self._units)
        self.holds.release_reads()
        self.holds.free_all()

    def begin(self) -> None:
        """Handle the first event of a backward; later calls in the same backward do nothing."""
        if self.state.present is Pass.BACKWARD:
            return
        self._begin()
        Variable._execution_engine.queue_callback(self._end_backward)

    def take_unreported(self) -> None:
        """Take the gradients of a backward of which no event was reported."""
        self.may_be_unreported = False
        if any(unit.has_left() for unit in self.deliveries):
            self._begin()
            self._end_backward()

    def _begin(self) -> None:
        if self.encodes_gradients is None:
            raise UsageError(
                f"wire.compress_until = {self._plan.wire.schedule} needs to know how far training is: call "
                "thinwire.progress(model, share) before each step, with the share of training that is done, 0 to 1"
            )
        self.state.before = self.state.present
        self.state.enter(Pass.BACKWARD)
        self.state.had_backward = True
        for index in self.holds.begin_backward():
            self._units[index].need(from_secondary=True)
        self._step_check.begin_backward()
        self._reducer.begin(self._schedule.turns(), last=self._schedule.last)

    def _end_backward(self) -> None:
        self.may_be_unreported = False
        self.state.enter(self.state.before)
        self.state.at = Phase.BACKWARD_END, -1
        for unit in self.deliveries:
            unit.end_backward()
        self._taken.flush()
        self._reducer.end()
        carried = self._schedule.retained().carried
        self._schedule.end_backward()
        self._open_calls = [0] * len(self._units)
        self.holds.end_backward()
        self.holds.free_all(keep=carried)
        if self._schedule.last:
            self._after_last()

    def need(self, index: int) -> None:
        """Gather a unit's parameters for its backward, or for the recomputation of its forward."""
        moment = self.state.at = self._needed[index]
        unit = self._units[index]
        unit.start_gather(from_secondary=True)
        start_gathers(self._units, self._schedule.backward_event(moment))
        unit.need(from_secondary=True)

    def _free_if_left(self, index: int) -> None:
        if not self._units[index].sharded:
            return
        if self._open_calls[index] <= 0 and index not in self._schedule.retained().carried:
            moment = self.state.at = Phase.POST_BACKWARD, index
            if self.holds.free(index):
                self._schedule.note_backward(moment)


def moments(phase: Phase, units: Sequence[Unit]) -> list[Moment]:
    """An event of every unit, made once: hooks make no objects."""
    return [(phase, unit.index) for unit in units]
