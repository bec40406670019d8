"""The passes of one model: turns the events that its hooks report into actions of units, reducer and schedule.

A unit's life is ``pre_forward``, ``post_forward``, ``pre_backward``, ``all_gradients`` and ``post_backward``.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Variable

from thinwire.errors import UsageError
from thinwire.program import Moment, Phase
from thinwire.sharding.grads.reducer import Reducer
from thinwire.sharding.lanes.streams import Mark
from thinwire.sharding.params.param_group import State, Unit, start_gathers
from thinwire.sharding.step.pinned_units import Holds, recomputing
from thinwire.sharding.step.schedule import Schedule
from thinwire.sharding.step.sharded_model import ShardedModel, unknown_progress
from thinwire.sharding.step.step_check import StepCheck

_MOST_TAKEN: Final = 1 << 17
"""Most elements of gradients that wait to be given to the reducer."""


class Pass(enum.Enum):
    """The pass that the model is in.

    ``enter_forward`` leads from ``IDLE`` to ``FORWARD``, and ``leave_forward`` leads back. The first event of a
    backward leads to ``BACKWARD``. Its end restores the previous pass, because a model may run a backward inside its
    forward. If a backward raises, the model stays in ``BACKWARD`` until the next event outside of it.
    """

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class PassState:
    """The state of a model's passes.

    Attributes:
        present: The pass that the model is in. A plain attribute, because every hook reads it; :meth:`enter` sets it.
        inside: Whether modules see the tensors that they compute with rather than shares; follows ``present``.
        is_plain: Whether the events of units that are whole and up to date are only noted. The model's forward sets it,
            and the end of the pass clears it.
        records: Whether the model's forward has begun with gradients enabled.
        before: Pass in which the current backward began.
        at: Last event, for the roll call.
        began: For each unit, the time at which its current forward or backward began, for timelines.
        had_backward: Whether a backward has begun since the last step.
        waits_for_backward: Whether a forward since the last step has recorded a graph.
    """

    def __init__(self, num_units: int) -> None:
        self.inside = self.is_plain = self.records = False
        self.had_backward = self.waits_for_backward = False
        self._opened: list[Unit] = []
        self.present = self.before = Pass.IDLE
        self.at: Moment = (Phase.STEP, -1)
        self.began: list[Mark] = [None] * num_units

    def enter(self, present: Pass) -> None:
        """Change the pass that the model is in."""
        self.present, self.inside, self.is_plain = present, present is not Pass.IDLE, False
        if not self.inside:
            for unit in self._opened:
                if unit.is_open:
                    unit.close()
            self._opened.clear()

    def open(self, unit: Unit) -> None:
        """Let modules read a ready unit's parameters without asking further, until the pass ends."""
        if self.inside and not unit.is_open:
            unit.is_open = True
            unit.opened(True)
            self._opened.append(unit)


class Delivery(Protocol):
    """What takes the gradients of one unit's trained parameters from autograd."""

    def has_left(self) -> bool:
        """Whether autograd has left gradients in place."""

    def end_backward(self) -> None:
        """Deliver what waits for other gradients of the unit, and what autograd has left."""

    def forget(self) -> None:
        """Drop what waits for other gradients of the unit, and what autograd has left."""


class Passes:
    """The passes of one model. ``before_computing`` is called before parameters are used for computation, and
    ``after_last`` after a step's last backward.

    Attributes:
        root_unit: Number of the unit that was called outside of the model's forward, so that its own forward is the
            current pass; ``None`` otherwise.
        encodes_gradients: Whether gradients are encoded in this step; ``None`` if that depends on the progress of
            training, which the caller has not reported yet.
        gradients_count: Whether this rank's gradients count. If not, the rank has run out of data, and its gradients
            are zero.
        deliveries: What takes the gradients of each trained unit from autograd, by the unit's number.
        evaluates_from_secondary: Whether forwards without a backward gather from secondary shards.
        may_be_unreported: Whether a backward may have ended of which no event was reported, because it has reached only
            parameters without hooks: a forward has recorded a graph, and no backward has ended since.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        schedule: Schedule,
        reducer: Reducer,
        step_check: StepCheck,
        holds: Holds,
        *,
        before_computing: Callable[[], None],
        after_last: Callable[[], None],
    ) -> None:
        self._sharded, self._units, self._plan, self._lanes = sharded, sharded.units, sharded.plan, sharded.lanes
        self._schedule, self._reducer, self._step_check, self.holds = schedule, reducer, step_check, holds
        self._before_computing, self._after_last = before_computing, after_last
        self.state, self.audit = PassState(len(self._units)), step_check.audit
        self._is_sharded = any(unit.sharded for unit in self._units)
        # An event of every unit, made once: hooks make no objects.
        self._begins, self._ends, self._needed, self._grads_ready = (
            [(phase, unit.index) for unit in self._units]
            for phase in (Phase.PRE_FORWARD, Phase.POST_FORWARD, Phase.PRE_BACKWARD, Phase.GRADS_READY)
        )
        self.root_unit: int | None = None
        self._root_depth = 0  # number of nested calls of that unit
        self._is_transformed = False  # whether a transform of torch.func calls the current forward
        # For each unit, the number of calls with outputs that backward has reached and inputs that it has not.
        self._open_calls = [0] * len(self._units)
        self.encodes_gradients: bool | None = True if self._plan.wire.compress_until == 1.0 else None
        self.gradients_count = True
        self.deliveries: dict[int, Delivery] = {}
        # Gradients of small units, taken from autograd until they are given to the reducer together: its code then runs
        # for several units at once, while it is in the processor's cache.
        self._taken: dict[int, list[torch.Tensor]] = {}
        self._taken_elements = 0
        self._sizes: dict[int, int] = {}
        self.evaluates_from_secondary = self.may_be_unreported = False

    def deliver_by(self, index: int, delivery: Delivery) -> None:
        """Let an object take the gradients of a unit, in the place of the one before."""
        self.deliveries[index] = delivery
        self._sizes[index] = sum(part.layout.numel for part in self._reducer.gradients[index])

    # -- the model ---------------------------------------------------------------------------------------------

    def is_inside(self) -> bool:
        """Whether modules see the tensors that they compute with rather than shares. Unlike ``state.inside``, the
        result is also right after a backward that raised."""
        if self.state.present is Pass.BACKWARD:
            self.forget_failed()
        return self.state.inside or self.holds.depth > 0 or recomputing()

    def reach_step(self) -> None:
        """Handle the end of a step's micro-batches, which may have failed.

        Raises:
            UsageError: The model is complete, its forward recorded a graph, and no backward has reached a parameter.
        """
        self.state.at = Phase.STEP, -1
        self.forget_failed()
        self.take_unreported()
        if self._sharded.is_whole_model and self.state.waits_for_backward and not self.state.had_backward:
            raise UsageError(
                "step() after a forward without a backward that reached the model's parameters: call loss.backward(), "
                "without inputs=, or run the forward under torch.no_grad(). Nothing was updated"
            )

    def enter_forward(self) -> None:
        """Handle the beginning of the model's forward."""
        if not recomputing():
            self.forget_failed()
            self._before_computing()
            self.holds.begin_forward()
            if self._is_sharded and torch._C._functorch.peek_interpreter_stack() is not None:
                self._gather_for_transform()
            self._schedule.begin_forward()
            self.state.enter(Pass.FORWARD)
            self.state.records = torch.is_grad_enabled()
            self.state.is_plain = (
                not self._is_sharded
                and self.root_unit is None
                and not self.holds.depth
                and not self.audit.compares_values
                and self._lanes.recorder.timeline is None
            )

    def _gather_for_transform(self) -> None:
        """Gather every unit, and keep it until the next backward or step has ended: the gradients of ``torch.func``
        call no hooks that would gather it again."""
        with temporarily_clear_interpreter_stack():  # a transform refuses writes to tensors from outside of it
            for unit in self._units:
                self.holds.reads.add(unit.index)
                unit.need(from_secondary=False)
        self.holds.depth += 1
        self._is_transformed = True

    def leave_forward(self) -> None:
        """Handle the end of the model's forward, which may have failed."""
        if self._is_transformed:
            self.holds.depth -= 1
            self._is_transformed = False
        if self.state.present is Pass.FORWARD:
            self.state.enter(Pass.IDLE)
        elif not recomputing():
            self.state.before = Pass.IDLE  # a backward inside this forward has failed
        if torch.is_grad_enabled():
            self.may_be_unreported = True
        elif not recomputing():
            self.holds.end_unrecorded()

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

    # -- one unit, from forward to backward --------------------------------------------------------------------

    def pre_forward(self, index: int) -> None:
        """Handle the beginning of a unit's forward."""
        state = self.state
        if recomputing():
            self.need(index)
            return
        if state.present is not Pass.FORWARD:
            self.forget_failed()
            if state.present is Pass.IDLE:
                self.root_unit = index
                self.enter_forward()
        if index == self.root_unit:
            self._root_depth += 1
        unit, moment = self._units[index], self._begins[index]
        if not torch.is_grad_enabled() and not self._will_repeat(moment):
            self._evaluate(unit)
            return
        state.at, state.waits_for_backward = moment, True
        if self._is_sharded:  # a whole unit gathers the next ones as well
            reuse = self._plan.secondary_reuse
            if unit.state is State.SHARDED:
                unit.start_gather(from_secondary=reuse)
            if batches := self._schedule.forward_event(moment):
                start_gathers(self._units, batches)
            unit.need(from_secondary=reuse)
        else:
            self._schedule.forward_event(moment)
            unit.join_spread()
        state.began[index] = self._lanes.recorder.mark() if self._lanes.recorder.timeline is not None else None

    def _will_repeat(self, moment: Moment) -> bool:
        """Whether a backward repeats a forward that records no graph now: that of a reentrant checkpoint. Only the
        micro-batch before tells, as nothing but the backward distinguishes it from an evaluation."""
        if not self.state.records:
            return False
        if moment[1] in self._schedule.programs.repeated:
            return True
        self._schedule.note_unrecorded(moment)
        return False

    def _evaluate(self, unit: Unit) -> None:
        """Prepare a unit for a forward without a backward."""
        if not unit.sharded:
            unit.join_spread()
            return
        if self.holds.depth:
            return
        self._schedule.order.events.append((Phase.STEP, unit.index))  # all ranks must gather the same units
        second = self.evaluates_from_secondary
        unit.start_gather(from_secondary=second)
        for upcoming in self._schedule.programs.following(unit.index):
            self._units[upcoming].start_gather(from_secondary=second)
        unit.need(from_secondary=second)

    def post_forward(self, index: int, *, will_hear: bool) -> None:
        """Handle the end of a unit's forward. ``will_hear``: whether a hook on the unit's outputs will report its
        backward."""
        if self.holds.depth or recomputing():
            return
        unit, state, moment = self._units[index], self.state, self._ends[index]
        records = torch.is_grad_enabled()
        if not records and not self._will_repeat(moment):
            self.holds.free(index)
            return
        state.at = moment
        if (began := state.began[index]) is not None:
            self._lanes.recorder.computed(f"forward {unit.name}", began)
            state.began[index] = None
        self._schedule.forward_event(moment)
        if not unit.sharded:
            return
        kept = index in self._schedule.retained().kept or (records and not will_hear)
        if not kept or self._plan.secondary_reuse:
            unit.keep_secondary()
        if not kept:
            self.holds.free(index)

    def leave_root_unit(self, index: int) -> None:
        """Handle the end of a unit's forward, which may have failed. It ends the pass if the unit was called alone."""
        if index == self.root_unit:
            self._root_depth -= 1
            if not self._root_depth:
                self.root_unit = None
                self.leave_forward()

    def pre_backward(self, index: int) -> None:
        """Handle a backward that reaches a unit's outputs, and needs it until :meth:`post_backward` or its end."""
        if self.state.present is not Pass.BACKWARD:
            self.begin()
        self._open_calls[index] += 1
        self.need(index)
        self.state.began[index] = self._lanes.recorder.mark() if self._lanes.recorder.timeline is not None else None

    def all_gradients(self, index: int, grads: list[torch.Tensor]) -> None:
        """Take the gradients of all trained parameters of a unit, in order."""
        state = self.state
        moment = state.at = self._grads_ready[index]
        self._schedule.backward.append(moment)
        if (began := state.began[index]) is not None:
            self._lanes.recorder.computed(f"backward {self._units[index].name}", began)
        if not self.gradients_count:
            grads = [torch.zeros_like(grad) for grad in grads]
        if index in self._taken:
            self._give_taken()  # gradients that come again are added to the first ones
        self._taken[index] = grads
        self._taken_elements += self._sizes[index]
        if self._taken_elements > _MOST_TAKEN or not self._reducer.may_wait(index):
            self._give_taken()
        if self._is_sharded:
            self._free_if_left(index)

    def collect(self, index: int, slot: int, grad: torch.Tensor) -> bool:
        """Take the gradient of a unit's trained parameter number ``slot``, in the parameter's shape, by itself; returns
        whether the unit is now complete."""
        self._give_taken()
        self._step_check.used.note(index, slot)
        return self._reducer.collect(index, slot, grad if self.gradients_count else torch.zeros_like(grad))

    def gradients_ready(self, index: int) -> None:
        """Handle the last gradient of a unit."""
        moment = self.state.at = self._grads_ready[index]
        self._schedule.backward.append(moment)
        if (began := self.state.began[index]) is not None:
            self._lanes.recorder.computed(f"backward {self._units[index].name}", began)
        self._reducer.ready(index)
        # After the last gradient of a unit, frozen weights are needed only on the way to the unit's inputs.
        self._free_if_left(index)

    def expect_input_gradient(self, index: int) -> None:
        """Handle the gradients of a unit's parameters that come before that of its input, which needs the unit."""
        self.begin()
        self._open_calls[index] += 1

    def input_gradient(self, index: int) -> None:
        """Handle a backward that computes the gradient of a unit's input next."""
        if index in self._taken or self._reducer.delivered(index):
            moment = self.state.at = Phase.INPUT_GRADIENT, index
            self._schedule.backward.append(moment)

    def post_backward(self, index: int) -> None:
        """Handle a backward that leaves one call of a unit, because the gradients of the call's inputs exist."""
        self._open_calls[index] -= 1
        if index not in self._sharded.gradients or index in self._taken or self._reducer.delivered(index):
            self._free_if_left(index)

    # -- the backward ------------------------------------------------------------------------------------------

    def forget_failed(self) -> None:
        """Clean up after a backward that raised: drop the parameters it gathered and the gradients it collected."""
        if self.state.present is not Pass.BACKWARD or recomputing():
            return
        self.state.enter(self.state.before)
        for unit in self.deliveries.values():
            unit.forget()
        self._taken, self._taken_elements = {}, 0
        self._step_check.used.undo_backward(self._reducer.abort())
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
        if any(unit.has_left() for unit in self.deliveries.values()):
            self._begin()
            self._end_backward()

    def _begin(self) -> None:
        if self.encodes_gradients is None:
            raise unknown_progress(f"wire.compress_until = {self._plan.wire.compress_until}")
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
        for unit in self.deliveries.values():
            unit.end_backward()
        self._give_taken()
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
        if self._reducer.on_host:
            self._reducer.fetch(index)
        moment = self.state.at = self._needed[index]
        unit = self._units[index]
        if unit.state is State.SHARDED:
            unit.start_gather(from_secondary=True)
        if batches := self._schedule.backward_event(moment):
            start_gathers(self._units, batches)
        unit.need(from_secondary=True)

    def _give_taken(self) -> None:
        """Give all gradients that were taken to the reducer, and mark their units as complete."""
        taken, self._taken, self._taken_elements = self._taken, {}, 0
        for unit, grads in taken.items():
            self._step_check.used.note_all(unit)
            self._reducer.take_whole(unit, grads)

    def _free_if_left(self, index: int) -> None:
        if not self._units[index].sharded:
            return
        if self._open_calls[index] <= 0 and index not in self._schedule.retained().carried:
            moment = self.state.at = Phase.POST_BACKWARD, index
            if self.holds.free(index):
                self._schedule.backward.append(moment)

    # -- reads outside of passes -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self, index: int) -> Iterator[None]:
        """Keep a unit's parameters whole and up to date in this block, outside of passes. Collective."""
        if not recomputing():
            self.forget_failed()
            self._before_computing()
        self._units[index].need(from_secondary=False)
        yield
        if self._units[index].sharded:
            self.holds.free(index)
            if torch.is_grad_enabled():
                self.holds.copied.add(index)

    def read(self, index: int) -> None:
        """Prepare a unit's parameters for a read, which may come from outside the unit's forward.

        Sharded units are gathered only inside the model's forward and backward, which run alike on all ranks.
        """
        unit = self._units[index]
        if not unit.sharded:
            unit.join_spread()
        elif self.state.present is Pass.FORWARD or recomputing():
            self.holds.reads.add(index)
            unit.need(from_secondary=self.evaluates_from_secondary)
