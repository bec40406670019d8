"""Runs the steps of one sharded model, from the first forward to the updated parameters.

docs/concepts.md defines the nouns. Three are the runtime's own:

- *Share*: the part of a P shard whose fp32 values (*masters*) and optimizer states a rank owns and updates. It is
  *spread* to the other ranks that hold the same P shard. Ranks that own the same share are *replicas*.
- *Trace*: the order in which units ran in a micro-batch, as reported by hooks. The *program* is what the plan says for
  it; see :mod:`thinwire.program`.
- *Ticket*: a collective that was submitted to a lane. Computation waits for it when it needs the result.

A runtime is a handful of objects with one responsibility each. Hooks report events to :class:`Passes`.
:class:`Schedule` tracks the position of the step in the program. :class:`Unit` gathers and frees parameters, and
:class:`Holds` keeps those that are still read. :class:`Reducer` reduces gradients in order. :class:`StepCheck`
exchanges with the other ranks. :class:`Spreads` sends updated parameters.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Final

import torch
from torch import nn

from thinwire.collectives.group import Control, before_shutdown, control, rollcall
from thinwire.errors import CheckpointError, UsageError
from thinwire.program import Axis, Lane
from thinwire.sharding.grads.optimizer_state import InnerOptimizer
from thinwire.sharding.grads.reducer import Reducer
from thinwire.sharding.grads.reductions import Reductions
from thinwire.sharding.grads.weight_means import WeightMeans
from thinwire.sharding.islands.elastic import ElasticExchanges
from thinwire.sharding.islands.exchanges import Exchanges
from thinwire.sharding.islands.others import OtherIslands
from thinwire.sharding.params.write_audit import WriteAudit
from thinwire.sharding.runtime.parameter import ShardedParameter
from thinwire.sharding.runtime.sharded_parameters import ShardedParameters
from thinwire.sharding.runtime.share_values import Masters, ShareGradients
from thinwire.sharding.step.param_broadcast import Spreads
from thinwire.sharding.step.passes import Passes
from thinwire.sharding.step.pinned_units import Holds
from thinwire.sharding.step.schedule import Programs, Schedule
from thinwire.sharding.step.sharded_model import ShardedModel
from thinwire.sharding.step.step_check import StepCheck, StepResult
from thinwire.spec import Plan
from thinwire.units import is_number


class Runtime:
    """Everything that one model needs while it trains.

    Attributes:
        sharded: The model, in units. The fields that are read most often are also attributes of the runtime.
        exchanges: Exchanges with other islands; ``None`` without islands.
        undo: Functions that remove the hooks from the model; call them in reverse order.
        methods: Names of further methods of the model that run like its forward.
        optimizer: Optimizer made by ``thinwire.optimizer``, which then owns the updates; ``None`` without one.
        masters: What code outside of passes writes to; ``None`` for a part of a larger model, which has no shares.
        gradients: The gradients of shares; ``None`` for a part of a larger model.
        parameters: Shares of the parameters; ``None`` for a part of a larger model.
        shares: The same, by name.
        means: The average of its weights; ``None`` without one.
        half_loaded: Why the model holds values of no single moment, since a load has begun to fill it and has not
            ended; ``None`` otherwise.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self.sharded = sharded
        self.model, self.plan, self.units = sharded.model, sharded.plan, sharded.units
        self.lanes, self.meter = sharded.lanes, sharded.meter
        self.programs = Programs(self.plan, [unit.info for unit in self.units], sharded.position)
        self.schedule = Schedule(self.programs)
        groups = {
            Axis.PARAMS: sharded.axes[Axis.PARAMS, Lane.REDUCE],
            Axis.SHARD: sharded.axes[Axis.SHARD, Lane.REDUCE],
            Axis.REPLICA: sharded.axes[Axis.REPLICA, Lane.SYNC],
        }
        reductions = Reductions(self.plan, sharded.gradients, groups, sharded.codecs.reduce, sharded.seeds)
        on_host = sharded.plan.residence.streams_gradients
        self.reducer = Reducer(sharded.gradients, reductions, self.lanes, on_host=on_host)
        self.holds = Holds(self.units, self._before_use)
        self.audit = WriteAudit(self.units)
        self.step_check = StepCheck(sharded, self.reducer, self.audit)
        self.spreads = Spreads(sharded, self.programs)
        self.exchanges = _exchanges(sharded)
        self.undo: Sequence[Callable[[], None]] = ()
        self.methods: Sequence[str] = ()
        self.optimizer: object | None = None
        self.means: WeightMeans | None = None
        self.half_loaded: str | None = None
        self.passes = Passes(
            sharded,
            self.schedule,
            self.reducer,
            self.step_check,
            self.holds,
            before_computing=self._before_use,
            after_last=self._after_backward,
        )
        rollcall().describe = _describer(self)
        self.masters: Masters | None = None
        self.gradients: ShareGradients | None = None
        self.parameters: ShardedParameters | None = None
        self.shares: Mapping[str, ShardedParameter] | None = None
        if sharded.is_whole_model:
            self.masters = Masters(sharded, self.passes, self.spreads, self.holds, self.finish_step)
            self.gradients = ShareGradients(sharded, self.passes, self.reducer, self.step_check, self.close_step)
            self.parameters = ShardedParameters(sharded, self.masters, self.gradients)
            self.shares = self.parameters.parameters

    @property
    def control(self) -> Control:
        """The ranks that train any part of the model."""
        return self.sharded.part.control

    @property
    def data_ranks(self) -> Control:
        """The ranks that train the model together."""
        return control(self.sharded.part.data.ranks)

    @property
    def everyone(self) -> Control:
        """All ranks that train the model, those of other islands included."""
        return control(self.sharded.part.data.everyone)

    @property
    def decides_on_device(self) -> bool:
        """Whether the device decides about a step, so that the host waits for no norm."""
        return self.sharded.decides_on_device

    @property
    def is_inner(self) -> bool:
        """Whether the model is a part inside of another, as experts are."""
        return self.sharded.part.is_inner

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps taken so far."""
        return self.sharded.steps.taken

    @property
    def is_inside(self) -> bool:
        """Whether the model is inside a forward, a backward or ``full_parameters()``."""
        return self.passes.is_inside()

    @property
    def blocks(self) -> Sequence[str]:
        """Names of the open blocks for reading, the outermost first."""
        return self.holds.blocks

    def refuse(self, action: str, *, beside: str | None = None) -> None:
        """Refuse an action inside a block for reading; see :meth:`Holds.refuse`."""
        self.holds.refuse(action, beside=beside)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Open a block, whose name refusals give, in which the model runs forwards and nothing is updated."""
        with self.holds.block(name), self.schedule.aside():
            yield

    def refuse_half_loaded(self) -> None:
        """Refuse to use a model that a load has left half filled.

        Raises:
            CheckpointError: The last load failed after it had begun to fill the model.
        """
        if self.half_loaded is not None:
            raise CheckpointError(self.half_loaded)

    def _before_use(self) -> None:
        self.refuse_half_loaded()
        if self.masters is not None:
            self.masters.train_wanted()
            self.masters.flush()

    def _after_backward(self) -> None:
        if self.gradients is not None and self.masters is not None:
            with self.masters.collecting_updates():
                self.gradients.after_backward()

    def reach_pause(self) -> None:
        """Reach a moment, between steps or micro-batches, in which nothing is on its way and units may change."""
        self.passes.forget_failed()
        self.passes.take_unreported()
        self.join()

    def units_grew(self) -> None:
        """Tell everything that counts trained parameters, gradients or buffers that units have others; see
        :meth:`reach_pause`."""
        infos = [unit.info for unit in self.units]
        self.schedule.restart(infos)
        self.reducer.recount()
        self.step_check.extend(infos)
        self.spreads.forget_parts()
        self.audit.watch()

    # -- micro-batches -----------------------------------------------------------------------------------------

    def begin_micro_batch(self, number: int, *, last: bool) -> None:
        """Begin a micro-batch, to which the next passes belong; see :meth:`Schedule.begin_micro_batch`."""
        self.schedule.begin_micro_batch(number, last=last)

    def select_micro_batch(self, number: int, *, last: bool) -> None:
        """Switch to another micro-batch of a pipeline; see :meth:`Schedule.select`."""
        self.schedule.select(number, last=last)

    @property
    def ends_step(self) -> bool:
        """Whether the next backward is the step's last, in which ranks combine gradients."""
        return self.schedule.last

    @property
    def backwards(self) -> int:
        """Number of backwards of this step that have ended."""
        return self.schedule.backwards

    def count_gradients(self, *, wanted: bool) -> None:
        """Set whether this rank's next gradients count; if not, they are zero, because the rank has run out of data."""
        self.passes.gradients_count = wanted

    # -- gradients ---------------------------------------------------------------------------------------------

    def close_step(self, *, measure: bool = False) -> StepResult:
        """Exchange the order of units, the used parameters and, on request, the norm with the other ranks, unless this
        step is closed already and no gradient has come since.

        Raises:
            MismatchError: See :meth:`StepCheck.close`.
            UsageError: See there.
            CheckpointError: The model is half loaded.
        """
        step_check = self.step_check
        if step_check.result is not None:
            self.passes.take_unreported()  # a graph that was retained may have had another backward
        if step_check.result is None:
            self.refuse_half_loaded()
            self.passes.reach_step()
            step_check.close(self.schedule.order.value, self.schedule.backwards)
            self.schedule.ranks_met(same_order=step_check.same_order)
            if self.exchanges is not None:
                self.exchanges.hold()
            if self.gradients is not None:
                self.gradients.merge()
        assert step_check.result is not None
        if measure and not step_check.result.measured:
            step_check.measure()
        return step_check.result

    def clip_gradients(self, norm: torch.Tensor, max_norm: float) -> None:
        """Scale the gradients so that the norm of the whole model is at most ``max_norm``; see
        :meth:`StepCheck.clip_gradients`."""
        try:
            max_norm = float(max_norm)
        except (TypeError, ValueError) as error:
            raise UsageError(f"max_norm = {max_norm!r}: give a number; inf only measures") from error
        if self.step_check.clip_gradients(norm, max_norm) and self.gradients is not None:
            self.gradients.forget_norms()

    def zero_grad(self) -> None:
        """Forget every gradient."""
        self.passes.forget_failed()
        for unit in self.passes.deliveries.values():
            unit.forget()
        self.reducer.join()
        if self.gradients is not None:
            self.gradients.drop()
        for part in self.reducer.parts:
            part.reset()
        self.step_check.forget_gradients()

    def progress(self, share: float) -> None:
        """Report the share of training that is done, 0 to 1; from ``wire.compress_until`` on, gradients are exact."""
        if not (is_number(share) and 0 <= share <= 1):
            raise UsageError(f"progress(share={share!r}): the share of training that is done is from 0 to 1")
        if self.exchanges is not None:
            self.exchanges.share = share
        encodes = share < self.plan.wire.compress_until or self.plan.wire.compress_until == 1.0
        if encodes == self.passes.encodes_gradients:
            return
        self.passes.encodes_gradients = encodes
        self.reducer.encode(wanted=encodes)
        self.programs.replan(self.plan if encodes else self.plan.with_exact_gradients())

    # -- the update --------------------------------------------------------------------------------------------

    def finish_step(self, *, updated: bool, only: Set[int] | None = None) -> None:
        """End the step: exchange with other islands, spread the updated P shards in the order of the forward, and begin
        the next step. A step may be taken without an update; ``only`` has the numbers of the units that were
        ``updated`` and have not begun to spread, all by default."""
        step = self.sharded.steps.taken + 1
        if self.exchanges is not None:
            if self.exchanges.writes() or not self.plan.residence.on_device:
                self.spreads.join()  # they may read the masters, or masters may be on their way to the host
            written, step, fetched = self.exchanges.end_step()
            if fetched:
                self.loaded(step, with_replicas=False)
                return
            self.spreads.write_back(sorted(written))
            if written:
                only = written if not updated else None if only is None else only | written
                updated = True
        self._begin_next(step, updated=updated, only=only)

    def _begin_next(self, step: int, *, updated: bool, exactly: bool = False, only: Set[int] | None = None) -> None:
        """Spread updated P shards, as :meth:`Spreads.start` does, and begin the next step; ``step`` are taken now."""
        self.sharded.steps.taken = step - 1  # the spread belongs to the step that ends
        if updated:
            self.holds.end_step()
            self.spreads.start(exactly=exactly, only=only)
        self.sharded.steps.taken = step
        self.holds.release_reads()
        self.passes.state.had_backward = self.passes.state.waits_for_backward = False
        self.audit.begin_step(step)
        self.schedule.abandon()
        self.step_check.result = None

    def enter_islands(self, optimizer: InnerOptimizer | None, island: int, lighthouse: str) -> int:
        """See :func:`thinwire.enter_islands`."""
        exchanges = self.exchanges
        if not isinstance(exchanges, ElasticExchanges):
            raise UsageError("enter_islands(): the plan has no islands.elastic = true, so all ranks are in one job")
        self.refuse("enter_islands()")
        exchanges.close()  # an earlier entry would be another island, which the others would wait for
        self.join_spreads()
        exchanges.hold()
        others = OtherIslands(self.sharded, island, lighthouse, self.data_ranks)
        entered = exchanges.enter(others, optimizer)
        if entered.fetched:
            self.loaded(entered.step, with_replicas=False)
        return self.num_steps

    def join_islands(self) -> None:
        """Give all islands the same parameters. Collective over all islands."""
        if self.exchanges is None:
            return
        self.refuse("join_islands()")
        self.join_spreads()
        written, step, fetched = self.exchanges.finish()
        if fetched:
            self.loaded(step, with_replicas=False)
            return
        self.spreads.write_back(sorted(written), differences=True)
        if written:
            self.spreads.start(exactly=True, only=written)

    def loaded(self, num_steps: int, *, with_replicas: bool) -> None:
        """Write back and spread all masters after they were loaded, from a moment after so many optimizer steps;
        ``with_replicas`` if the P-shard values that a plan with spread differences keeps were loaded as well."""
        self.join_spreads()
        self.spreads.write_back(range(len(self.units)), differences=not with_replicas)
        self._begin_next(num_steps, updated=True, exactly=True)

    def join_spreads(self, *, settle: bool = True) -> None:
        """Wait until every unit's parameters are up to date; to ``settle``, the host waits as well, so that it can read
        what lives there. Collective, if shares were written."""
        if self.masters is not None:
            self.masters.flush()
        self.spreads.join(settle=settle)

    def join(self) -> None:
        """Wait until parameters are up to date and gradients are combined; see :meth:`join_spreads`."""
        self.join_spreads()
        self.reducer.settle()

    def drain(self) -> None:
        """Wait until nothing is on its way."""
        self.lanes.drain()

    # -- whole parameters --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def full_parameters(self, *, write: bool) -> Iterator[None]:
        """See :func:`thinwire.full_parameters`."""
        self.holds.gather_all()
        carrying = contextlib.nullcontext() if self.parameters is None else self.parameters.carrying_writes(keep=write)
        try:
            with carrying, self.schedule.aside():
                yield
        finally:
            self.audit.excuse()
            self.holds.release_all()
            if self.masters is not None:
                self.masters.follow_settings()


def _exchanges(sharded: ShardedModel) -> Exchanges | None:
    """The exchanges with other islands, if there are others."""
    if sharded.plan.is_elastic:
        elastic = ElasticExchanges(sharded)
        before_shutdown(elastic.close)
        return elastic
    axis = sharded.axes.get((Axis.ISLANDS, Lane.OUTER))
    return None if axis is None else Exchanges(sharded, axis)


def _describer(runtime: Runtime) -> Callable[[], str]:
    """Create a function for other threads that describes the position of the step without keeping the runtime alive."""
    alive = weakref.ref(runtime)

    def describe() -> str:
        if (present := alive()) is None:
            return ""
        moment, unit = present.passes.state.at
        where = f" of {present.units[unit].name}" if 0 <= unit < len(present.units) else ""
        return f"step {present.num_steps}, {str(moment).replace('_', ' ')}{where}"

    return describe


RUNTIME: Final = "_thinwire_runtime"
"""Attribute of a sharded model that holds its runtime."""


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime of a sharded model.

    Raises:
        UsageError: The model is not sharded.
    """
    runtime = getattr(model, RUNTIME, None)
    if not isinstance(runtime, Runtime):
        raise UsageError(
            f"{type(model).__name__} is not sharded: call thinwire.shard(model, plan) first and pass the same object"
        )
    return runtime


def sharded_of(model: nn.Module) -> ShardedModel:
    """The units of a sharded model, and what its ranks share; see :func:`runtime_of`."""
    return runtime_of(model).sharded


def plan_of(model: nn.Module) -> Plan:
    """The plan of a sharded model; see :func:`runtime_of`."""
    return runtime_of(model).plan
