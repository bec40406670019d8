"""The runtime of one sharded model: a step, from the first forward to the updated parameters.

[Note: the nouns of the runtime]

- *Unit*: parameters that are gathered, freed and reduced together, for example those of one transformer block.
- *Flat buffer*: parameters of a unit that have a dtype, and whether they train and are encoded, in common; they lie end
  to end in one 1-D tensor, padded so that every factor of the plan divides it.
- *Shard*: the contiguous part of a flat buffer that a rank holds between steps (the P shard). Gathering a unit restores
  the whole buffers on every rank.
- *Share*: the part of a P shard whose fp32 values (*masters*) and optimizer states a rank owns and updates. It is
  *spread* to the other ranks that hold the same P shard.
- *Replica*: a rank that owns the same share as another one. Replicas add up their gradients; that is *syncing*.
- *Secondary shard*: a copy of a gathered buffer, cut among the ranks of a node, from which backward gathers again
  without crossing nodes (hpZ).
- *Trace*: the order in which units ran in a micro-batch, as hooks saw it.
- *Program*: what the plan means for a trace: the collectives of a step, the events that start them, wait for them and
  free units. See :mod:`thinwire.program`.
- *Lane*: an in-order queue of collectives that run beside computation.
- *Ticket*: a collective that was given to a lane; computation waits for it when it needs the result.

A runtime is a handful of objects with one subject each. Hooks report events to :class:`Passes`. :class:`Schedule` knows
where the step is in the program. :class:`Unit` gathers and frees, :class:`Holds` says who still reads. :class:`Reducer`
takes gradients in turn, :class:`Agreements` meets the other ranks, :class:`Spreads` sends updated parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence

from torch import nn

from thinwire.collectives.group import rollcall
from thinwire.errors import UsageError
from thinwire.program import Axis, Event, Lane, Scope
from thinwire.sharding.agreement import Agreement, Agreements
from thinwire.sharding.fragments import OwnedFragment
from thinwire.sharding.holds import Holds
from thinwire.sharding.memory.audit import WriteAudit
from thinwire.sharding.outside import Outside
from thinwire.sharding.passes import BackwardPass, Passes, PassState
from thinwire.sharding.programs import Programs
from thinwire.sharding.reducer import Reducer
from thinwire.sharding.reductions import Reductions
from thinwire.sharding.schedule import Schedule
from thinwire.sharding.sharded import ShardedModel
from thinwire.sharding.spreads import Spreads

__all__ = ["Runtime", "attach", "detach", "runtime_of", "sent_bytes"]


class Runtime:
    """Everything one model needs while it trains.

    Args:
        sharded: the model, in units.

    Attributes:
        sharded: the model, in units. Its fields that others read most are attributes of the runtime too.
        schedule: where the step is in the program.
        reducer: the gradients on their way.
        passes: what hooks report to.
        holds: who still reads gathered parameters.
        spreads: the updated parameters on their way.
        agreements: the exchanges of a step.
        audit: notices writes to parameters inside a forward.
        outside: the parameters as shares; ``None`` for a part of a model, whose parameters are sliced already.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self.sharded = sharded
        self.model, self.plan, self.part, self.rank = sharded.model, sharded.plan, sharded.part, sharded.rank
        self.units, self.arena, self.slices = sharded.units, sharded.arena, sharded.slices
        self.lanes, self.axes, self.meter = sharded.lanes, sharded.axes, sharded.meter
        self.schedule = Schedule(Programs(self.plan, [unit.info for unit in self.units], sharded.position))
        groups = {
            Axis.PARAMS: self.axes[Axis.PARAMS, Lane.REDUCE],
            Axis.SHARD: self.axes[Axis.SHARD, Lane.REDUCE],
            Axis.REPLICA: self.axes[Axis.REPLICA, Lane.SYNC],
        }
        reductions = Reductions(self.plan, sharded.gradients, groups, sharded.codecs.reduce, sharded.seeds)
        self.reducer = Reducer(sharded.gradients, reductions, self.lanes)
        self.holds = Holds(self.units)
        self.audit = WriteAudit(self.units)
        self.agreements = Agreements(sharded, self.reducer, self.audit)
        self.spreads = Spreads(sharded, self.schedule.programs)
        self.undo: list[Callable[[], None]] = []  # takes every hook off the model again, the last one first
        self.optimizer: object | None = None  # made by thinwire.optimizer, which then owns the updates
        state = PassState(len(self.units))
        backward = BackwardPass(state, sharded, self.schedule, self.reducer, self.agreements, self.holds)
        self.passes = Passes(sharded, self.schedule, backward, state, self.holds)
        rollcall().describe = _describer(self)
        self.outside: Outside | None = Outside(self) if sharded.alone else None
        if self.outside is not None:
            self.passes.before_computing = self.holds.before_gathering = self.outside.flush
            self.passes.backward.after_last = self.outside.after_backward

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken so far."""
        return self.sharded.seeds.step

    def now(self) -> tuple[int, Event]:
        """The number of the present step, and the event that was reported last; for journals."""
        return self.num_steps, Event(*self.passes.state.at, self.schedule.micro_batch)

    # -- micro-batches -----------------------------------------------------------------------------------------

    def begin_micro_batch(self, number: int, *, last: bool) -> None:
        """The forward and the backward that follow are those of one micro-batch of the step.

        Args:
            number: of the micro-batch, from 0.
            last: whether its backward is the step's last.
        """
        self.schedule.begin_micro_batch(number, last=last)

    def select_micro_batch(self, number: int, *, last: bool) -> None:
        """Turn to one of several micro-batches that are under way, as in a pipeline; arguments as in
        :meth:`begin_micro_batch`."""
        self.schedule.select(number, last=last)

    # -- gradients ---------------------------------------------------------------------------------------------

    def agree(self, *, measure: bool) -> Agreement:
        """Compare with the other ranks: order of units, used parameters, and the norm if asked for.

        Args:
            measure: whether the gradient norm is needed.

        Raises:
            MismatchError: if two ranks ran units in a different order or took a different number of steps.
            UsageError: on every rank, if the backward of the last micro-batch is missing on any, or a forward wrote to
                parameters on any.
        """
        self.passes.reach_step()
        if self.outside is not None:
            self.passes.refuse_missing_backward()
        steps = self.schedule.order_hash, self.schedule.backwards
        agreement = self.agreements.agree(*steps, measure=False)
        self.schedule.ranks_met(same_order=self.agreements.same_order)
        if self.outside is not None:
            self.outside.merge()
        return self.agreements.agree(*steps, measure=True) if measure else agreement

    def set_norm(self, norm: float) -> None:
        """The gradients that ranks agreed on have another norm now: they were scaled, or are not to be used."""
        self.agreements.set_norm(norm)

    def used_flag(self, index: int, slot: int) -> bool:
        """Whether any rank had a gradient for a parameter in this step."""
        self.agree(measure=False)
        return self.agreements.used.is_used(index, slot)

    def zero_grad(self) -> None:
        """Forget every gradient."""
        self.passes.backward.forget_failed()
        self.reducer.join()
        self.reducer.reset()
        self.agreements.forget_gradients()
        if self.outside is not None:
            self.outside.drop_added()

    def progress(self, share: float) -> None:
        """How much of training is done: past ``wire.schedule`` gradients travel without a codec."""
        encodes = share < self.plan.wire.schedule or self.plan.wire.schedule == 1.0
        if encodes == self.passes.backward.encodes_gradients:
            return
        self.passes.backward.encodes_gradients = encodes
        self.reducer.encode(wanted=encodes)
        self.schedule.programs.replan(self.plan if encodes else self.plan.with_exact_gradients())

    # -- the update --------------------------------------------------------------------------------------------

    def fragments(self) -> list[OwnedFragment]:
        """The pieces of parameters that this rank updates."""
        return self.sharded.fragments()

    def update_order(self) -> Sequence[int]:
        """Units in the order in which their gradients arrive; those without gradients left out."""
        return [index for index in self.schedule.programs.update_order() if index in self.sharded.gradients]

    def finish_step(self, *, updated: bool, exactly: bool = False, only: Collection[int] | None = None) -> None:
        """End the step: spread the updated P shards, in the order of the forward, and begin the next one.

        Args:
            updated: whether parameters have new values; a step may be taken without an update.
            exactly: where differences are spread, spread the values themselves, without a codec.
            only: numbers of the units that were updated; all by default.
        """
        if updated:
            self.holds.end_step()
            self.spreads.start(exactly=exactly, only=only)
        self.sharded.seeds.step += 1
        self.holds.release_reads()
        self.passes.state.end_step()
        self.audit.begin_step(self.num_steps)
        self.schedule.abandon()
        self.agreements.forget()

    def loaded(self, num_steps: int, *, with_replicas: bool) -> None:
        """All masters were loaded: write them back and spread them.

        Args:
            num_steps: optimizer steps that had been taken when they were saved.
            with_replicas: where differences are spread, what ranks held of their own shares was loaded as well.
        """
        self.join_spreads()
        for unit in self.units:
            self.spreads.write_back(unit.index, differences=not with_replicas)
        self.sharded.seeds.step = num_steps - 1
        self.finish_step(updated=True, exactly=True)

    def join_spreads(self) -> None:
        """Wait until every unit's parameters are up to date. Collective, if shares of parameters were written."""
        if self.outside is not None:
            self.outside.flush()
        self.spreads.join()


def _describer(runtime: Runtime) -> Callable[[], str]:
    """A function that says where the step is, in words, for other threads, and does not keep the runtime alive."""
    alive = weakref.ref(runtime)

    def describe() -> str:
        if (present := alive()) is None:
            return ""
        moment, unit = present.passes.state.at
        where = f" of {present.units[unit].name}" if 0 <= unit < len(present.units) else ""
        return f"step {present.num_steps}, {str(moment).replace('_', ' ')}{where}"

    return describe


_RUNTIME = "_thinwire_runtime"


def attach(model: nn.Module, runtime: Runtime) -> None:
    """Remember a model's runtime."""
    object.__setattr__(model, _RUNTIME, runtime)


def detach(model: nn.Module) -> None:
    """Forget a model's runtime."""
    object.__delattr__(model, _RUNTIME)


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime of a sharded model.

    Raises:
        UsageError: if the model has not been through ``tw.shard``.
    """
    runtime = getattr(model, _RUNTIME, None)
    if not isinstance(runtime, Runtime):
        raise UsageError(
            f"{type(model).__name__} is not sharded: call thinwire.shard(model, plan) first and pass the same object"
        )
    return runtime


def sent_bytes(runtime: Runtime) -> dict[str, dict[str, int]]:
    """Bytes sent since the last call, by lane and scope."""
    return {
        str(lane): {str(scope): by_scope[scope] for scope in Scope} for lane, by_scope in runtime.meter.take().items()
    }
