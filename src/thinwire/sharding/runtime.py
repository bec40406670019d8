"""The runtime of one sharded model: hooks report events, units act, the schedule adds what may start early."""

from __future__ import annotations

import functools
import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.autograd import Variable

from thinwire.codecs import Codec
from thinwire.collectives.all_gather import all_gather
from thinwire.collectives.group import Meter
from thinwire.collectives.memory import allocate
from thinwire.collectives.moves import Moves
from thinwire.collectives.topology import AxisGroup
from thinwire.errors import MismatchError, UsageError
from thinwire.program import NORM_BYTES, Axis, Event, Kind, Lane, Operation, Phase, Scope, control_bytes
from thinwire.sharding.encoding import PlanCodecs
from thinwire.sharding.fragments import OwnedFragment, own_fragments
from thinwire.sharding.gradient import UnitGradient
from thinwire.sharding.journal import Load
from thinwire.sharding.lanes import Lanes, Mark
from thinwire.sharding.local import Part, Slice
from thinwire.sharding.programs import Programs
from thinwire.sharding.reducer import Reducer
from thinwire.sharding.reductions import Reductions
from thinwire.sharding.schedule import Schedule
from thinwire.sharding.seeds import Seeds
from thinwire.sharding.unit import FlatBuffer, Unit
from thinwire.spec import Plan

__all__ = ["Agreement", "Runtime", "runtime_of"]

_NORM_BLOCK: Final = 1 << 18
"""Elements whose squares are added up in fp32."""


@dataclass(frozen=True)
class Agreement:
    """What the step's exchanges established, the same on every rank.

    Attributes:
        norm: L2 norm of the whole gradient; NaN if nobody asked for it.
        measured: whether the norm was asked for.
        used: for each trainable parameter, in order, whether any rank had a gradient for it.
    """

    norm: float
    measured: bool
    used: tuple[bool, ...]

    @property
    def finite(self) -> bool:
        """Whether the norm, and so every gradient, is finite."""
        return self.norm - self.norm == 0.0


class Runtime:
    """Everything one model needs while it trains.

    Args:
        model: the root module.
        plan: the plan.
        units: its units.
        gradients: by unit, for units with trainable parameters: one for each trainable buffer, in their order.
        arena: the fp32 memory all owned gradients are carved from.
        lanes: where communication runs.
        meter: counts the bytes.
        axes: the groups, by axis and lane.
        rank: this rank.
        codecs: what encodes messages.
        seeds: for codecs that round at random.
        part: what of a larger model it is.
        slices: by parameter, which slice of it tensor parallelism has left here, if not all of it.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        units: Sequence[Unit],
        gradients: Mapping[int, Sequence[UnitGradient]],
        arena: torch.Tensor,
        lanes: Lanes,
        meter: Meter,
        axes: dict[tuple[Axis, Lane], AxisGroup],
        rank: int,
        codecs: PlanCodecs,
        seeds: Seeds,
        part: Part,
        slices: Mapping[str, Slice | None],
    ) -> None:
        self.codecs, self.seeds, self.part, self.slices = codecs, seeds, part, slices
        self.model, self.plan, self.units, self.gradients = model, plan, tuple(units), gradients
        self.arena, self.lanes, self.meter, self.rank = arena, lanes, meter, rank
        self.axes = axes
        infos = [unit.info for unit in units]
        self.schedule = Schedule(Programs(plan, infos, rank))
        groups = {
            Axis.PARAMS: axes[Axis.PARAMS, Lane.REDUCE],
            Axis.SHARD: axes[Axis.SHARD, Lane.REDUCE],
            Axis.REPLICA: axes[Axis.REPLICA, Lane.SYNC],
        }
        self.reducer = Reducer(gradients, Reductions(plan, gradients, groups, codecs.reduce, seeds), lanes)
        self.agreement: Agreement | None = None
        self._at: tuple[Phase, int] = (Phase.STEP, -1)
        self._first_bit = self._number_parameters()
        self._used = bytearray(sum(info.parameters for info in infos))
        self._used_before = bytes(self._used)
        self._in_backward = False
        self._open_calls = [0] * len(self.units)
        self._in_forward = False
        self._read_elsewhere: set[int] = set()
        self._began: list[Mark] = [None] * len(self.units)
        self._creates_graph = False
        self._graphs_of_graphs = False  # a backward with create_graph left nodes that read parameters unannounced
        self.whole = 0  # depth of full_parameters()
        self.has_optimizer = False
        self._unused_backwards = 0
        self.encodes_gradients: bool | None = True if plan.wire.schedule == 1.0 else None  # None: nobody has said yet

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken so far."""
        return self.seeds.step

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self.seeds.step = value

    def now(self) -> tuple[int, Event]:
        """The number of the present step, and the event that was reported last."""
        return self.num_steps, Event(*self._at, self.schedule.micro_batch)

    # -- events, as hooks report them --------------------------------------------------------------------------

    def pre_forward(self, index: int) -> None:
        """A unit's forward begins."""
        unit = self.units[index]
        if self.recomputing():
            self._need_in_backward(index)
            return
        self._forget_failed_backward()
        if not torch.is_grad_enabled():
            if unit.sharded:
                self.schedule.note_evaluation(index)
            unit.start_gather(from_secondary=False)
            for upcoming in self.schedule.programs.following(index):
                self.units[upcoming].start_gather(from_secondary=False)
            unit.need(from_secondary=False)
            return
        self._at = Phase.PRE_FORWARD, index
        reuse = self.plan.secondary_reuse
        unit.start_gather(from_secondary=reuse)
        for prefetch in self.schedule.forward_event(Phase.PRE_FORWARD, index):
            self.units[prefetch.unit].start_gather(from_secondary=prefetch.from_secondary)
        unit.need(from_secondary=reuse)
        self._began[index] = self.lanes.mark()

    def post_forward(self, index: int, *, will_hear: bool) -> None:
        """A unit's forward ends.

        Args:
            index: the unit.
            will_hear: whether backward will announce itself at this unit's outputs.
        """
        if self.recomputing() or self.whole:
            return
        unit = self.units[index]
        if not torch.is_grad_enabled():
            self._free(unit)
            return
        self._at = Phase.POST_FORWARD, index
        self.lanes.computed("forward", unit.name, self._began[index])
        self.schedule.forward_event(Phase.POST_FORWARD, index)
        if not unit.sharded:
            return
        kept = index in self.schedule.kept() or not will_hear
        if not kept or self.plan.secondary_reuse:
            unit.keep_secondary()
        if not kept:
            self._free(unit)

    def enter_forward(self) -> None:
        """The model's forward begins."""
        self._in_forward = not self.recomputing()

    def leave_forward(self) -> None:
        """The model's forward has ended, or failed."""
        self._in_forward = False
        if not torch.is_grad_enabled() and not self.recomputing():
            self._let_go_of_reads()

    def read(self, index: int) -> None:
        """Somebody is about to read a unit's parameters, maybe outside of its forward.

        What is sharded is gathered inside the model's forward and backward alone, which all ranks run alike. No hook
        says when such a reader is done, so it stays whole until the backward has ended.
        """
        unit = self.units[index]
        if not unit.sharded:
            unit.join_spread()
        elif self._in_forward or self.recomputing():
            self._read_elsewhere.add(index)
            unit.need(from_secondary=False)

    def _let_go_of_reads(self) -> None:
        read, self._read_elsewhere = self._read_elsewhere, set()
        for index in read:
            self._free(self.units[index])

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
        self._began[index] = self.lanes.mark()

    def gradient(self, index: int, slot: int, grad: torch.Tensor) -> None:
        """A parameter's gradient exists."""
        self._enter_backward()
        self._used[self._first_bit[index] + slot] = 1
        if self.reducer.collect(index, slot, grad):
            self._at = Phase.GRADS_READY, index
            self.schedule.note_backward(Phase.GRADS_READY, index)
            self.lanes.computed("backward", self.units[index].name, self._began[index])
            self.reducer.ready(index)
            # Frozen weights may be needed after the last gradient of a unit, but only on the way to its inputs.
            self._free_if_left(index)

    def post_backward(self, index: int) -> None:
        """Backward has left a unit by one of its calls: the gradients of that call's inputs exist."""
        self._open_calls[index] -= 1
        if index not in self.gradients or self.reducer.delivered(index):
            self._free_if_left(index)

    def _free_if_left(self, index: int) -> None:
        if self._open_calls[index] <= 0:
            self._at = Phase.POST_BACKWARD, index
            if self._free(self.units[index]):
                self.schedule.note_backward(Phase.POST_BACKWARD, index)

    def _free(self, unit: Unit) -> bool:
        """Free a unit's gathered parameters, unless somebody still needs them; whether it was freed."""
        if self.whole or self._graphs_of_graphs or unit.index in self._read_elsewhere:
            return False
        return unit.free()

    def recomputing(self) -> bool:
        """Whether a backward is running on this thread, so that a forward is a recomputation."""
        return torch._C._current_graph_task_id() != -1

    def _need_in_backward(self, index: int) -> None:
        self._at = Phase.PRE_BACKWARD, index
        unit = self.units[index]
        unit.start_gather(from_secondary=True)
        for prefetch in self.schedule.backward_event(index):
            self.units[prefetch.unit].start_gather(from_secondary=prefetch.from_secondary)
        unit.need(from_secondary=True)

    def _enter_backward(self) -> None:
        if self._in_backward:
            return
        if self.encodes_gradients is None:
            raise UsageError(
                f"wire.schedule = {self.plan.wire.schedule} needs to know how far training is: call "
                "thinwire.progress(model, share) before each step, with the share of training that is done, 0 to 1"
            )
        self._in_backward = True
        self._used_before = bytes(self._used)
        self._creates_graph = torch.is_grad_enabled()
        self._graphs_of_graphs |= self._creates_graph
        self.agreement = None
        self.reducer.begin(self.schedule.turns(), last=self.schedule.last)
        Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._in_backward = False
        self._at = Phase.BACKWARD_END, -1
        if self.schedule.last and not self.has_optimizer:
            self._note_unused_gradients()
        self._graphs_of_graphs &= self._creates_graph
        self.reducer.end()
        self.schedule.end_backward()
        self._open_calls = [0] * len(self.units)
        self._read_elsewhere.clear()
        for unit in self.units:
            self._free(unit)

    def _note_unused_gradients(self) -> None:
        """An optimizer of torch's own would find no gradients, and train nothing, without a word."""
        self._unused_backwards += 1
        if self._unused_backwards == 2:
            warnings.warn(
                "thinwire: gradients of this model go nowhere, as it has no optimizer: parameters keep no .grad, and "
                "torch's optimizers and clip_grad_norm_ do nothing with them. Use thinwire.optimizer(model, "
                "torch.optim.AdamW, lr=...) and thinwire.clip_grad_norm_(model, ...)",
                stacklevel=2,
            )

    def _forget_failed_backward(self) -> None:
        """After a backward that raised, its end was never called: what it had gathered and collected goes."""
        if not self._in_backward or self.recomputing():
            return
        self._in_backward = False
        self._used[:] = self._used_before
        self.reducer.abort()
        self.schedule.abandon_micro_batch()
        self._open_calls = [0] * len(self.units)
        self._read_elsewhere.clear()
        for unit in self.units:
            self._free(unit)

    # -- the step ----------------------------------------------------------------------------------------------

    def agree(self, *, measure: bool) -> Agreement:
        """Compare with the other ranks: order of units, used parameters, and the norm if asked for.

        Args:
            measure: whether the gradient norm is needed. It takes a pass over this rank's share, for which every
                reduction is joined, and an exchange of its own; otherwise reductions go on meanwhile.

        Raises:
            MismatchError: if two ranks ran units in a different order or took a different number of steps.
            UsageError: on every rank, if the backward of the last micro-batch is missing on any.
        """
        self._at = Phase.STEP, -1
        if self.agreement is None:
            self._forget_failed_backward()
            # Before the reductions are joined: those of ranks that ran different steps wait for each other in vain.
            self.agreement = Agreement(float("nan"), False, self._compare_steps())
        if measure and not self.agreement.measured:
            self._forget_failed_backward()
            self.reducer.join()
            everyone = self._exchange(struct.pack("<d", self._squared_norm()), NORM_BYTES)
            norm = sum(struct.unpack_from("<d", row)[0] for row in everyone) ** 0.5
            self.agreement = Agreement(norm, True, self.agreement.used)
            if not self.agreement.finite:
                self.reducer.forget_lost()  # what codecs lost of such gradients is not finite either
        return self.agreement

    def _compare_steps(self) -> tuple[bool, ...]:
        """Whether any rank had a gradient, for each trainable parameter; all ranks have to have run the same step."""
        unfinished = int(any(gradient.unsynced for gradient in self.reducer.parts))
        words = struct.pack("<qqq", self.schedule.order_hash, unfinished, self.num_steps)
        bits = _to_bits(self._used)
        everyone = self._exchange(words + bits, control_bytes([unit.info for unit in self.units]))
        rows = [struct.unpack_from("<qqq", row) for row in everyone]
        for rank, row in enumerate(rows):
            if (row[0], row[2]) != (rows[0][0], rows[0][2]):
                raise MismatchError(
                    f"rank {rank} and rank 0 ran different steps: order of units {row[0]:#x} against "
                    f"{rows[0][0]:#x}, step {row[2]} against {rows[0][2]}. Every rank must run the same units in the "
                    "same order; look for branches that depend on the data or the rank. Nothing was updated"
                )
        if any(row[1] for row in rows):
            raise UsageError(
                f"rank {next(rank for rank, row in enumerate(rows) if row[1])} has gradients that were never "
                "synchronised: the backward of the last of thinwire.micro_batches(...) is missing. Run it, or call "
                "zero_grad() to drop the step. Nothing was updated"
            )
        used = bytearray(len(bits))
        for row_bits in everyone:
            for i, byte in enumerate(row_bits[len(words) :]):
                used[i] |= byte
        return tuple(bool(used[i // 8] >> (i % 8) & 1) for i in range(len(self._used)))

    def update_order(self) -> Sequence[int]:
        """Units in the order in which their gradients arrive; those without gradients left out."""
        return [index for index in self.schedule.programs.update_order() if index in self.gradients]

    def write_back(self, index: int) -> None:
        """A unit's masters have new values: cast them into its P shard, unless the difference is what is spread."""
        unit = self.units[index]
        unit.updated()
        for buffer in unit.buffers:
            if buffer.layout.trainable and not self._spreads_difference(buffer):
                write_back(buffer, self.axes[Axis.SHARD, Lane.SPREAD].index)

    def spread(self, *, exactly: bool = False) -> None:
        """Spread the updated P shards, in the order of the forward, and begin the next step.

        Args:
            exactly: where differences are spread, spread the values themselves, as they are.
        """
        self._graphs_of_graphs = False
        for operation, waited in self.schedule.programs.spreads():
            unit = self.units[operation.units[0]]
            for number, buffer in enumerate(unit.buffers):
                if buffer.layout.trainable and buffer.layout.encoded is operation.encoded:
                    unit.spread(number, operation.lane, self._spread(operation, buffer, exactly=exactly))
            if waited:
                unit.join_spread()
        self._begin_step()

    def _spread(self, operation: Operation, buffer: FlatBuffer, *, exactly: bool) -> Moves:
        codec = self.codecs.spread if buffer.layout.encoded else None
        update = None
        if self._spreads_difference(buffer):
            codec, update = (None, None) if exactly else (codec, buffer.master)
        seed = self.seeds.of_unit(Lane.SPREAD, operation.units[0])
        return _spread(self.axes[operation.axis, Lane.SPREAD], buffer, operation.kind, codec, update, seed)

    def loaded(self, *, with_replicas: bool) -> None:
        """All masters have new values: write them back and spread them.

        Args:
            with_replicas: where differences are spread, what ranks held of their own shares has been loaded as well.
        """
        self.join_spreads()
        for unit in self.units:
            unit.updated()
            for buffer in unit.buffers:
                if buffer.layout.trainable and not (with_replicas and self._spreads_difference(buffer)):
                    write_back(buffer, self.axes[Axis.SHARD, Lane.SPREAD].index)
        self.spread(exactly=True)

    def skipped(self) -> None:
        """The step was taken without an update."""
        self._begin_step()

    def _begin_step(self) -> None:
        self.num_steps += 1
        self._read_elsewhere.clear()
        self.schedule.abandon()
        self.agreement = None

    def zero_grad(self) -> None:
        """Forget every gradient."""
        self._forget_failed_backward()
        self.reducer.join()
        self.reducer.reset()
        self._used = bytearray(len(self._used))
        self.agreement = None

    def join_spreads(self) -> None:
        """Wait until every unit's parameters are up to date."""
        for unit in self.units:
            unit.join_spread()

    def progress(self, share: float) -> None:
        """How much of training is done: past ``wire.schedule`` gradients travel as they are."""
        encodes = share < self.plan.wire.schedule or self.plan.wire.schedule == 1.0
        if encodes == self.encodes_gradients:
            return
        self.encodes_gradients = encodes
        self.reducer.encode(wanted=encodes)
        self.schedule.programs.replan(self.plan if encodes else self.plan.with_exact_gradients())

    # -- whole parameters --------------------------------------------------------------------------------------

    def gather_all(self) -> None:
        """Gather every unit and keep it."""
        if self.recomputing():
            raise UsageError("full_parameters() cannot be entered inside a backward")
        self.whole += 1
        for unit in self.units:
            if not unit.exact:
                unit.free()  # it was gathered through a codec
            unit.start_gather(from_secondary=False, exact=True)
        for unit in self.units:
            unit.need(from_secondary=False)

    def release_all(self) -> None:
        """Undo one :meth:`gather_all`."""
        self.whole -= 1
        for unit in self.units:
            self._free(unit)

    def refuse_if_whole(self, what: str) -> None:
        """Raise if inside ``full_parameters``, whose parameters would be stale.

        Raises:
            UsageError: naming ``what`` was tried.
        """
        if self.whole:
            raise UsageError(f"{what} inside full_parameters(), which is for reading: leave the block first")

    # -- parts -------------------------------------------------------------------------------------------------

    def _spreads_difference(self, buffer: FlatBuffer) -> bool:
        """Whether ranks hold something else of a buffer than its masters, and are told how far it is from them."""
        spreads = self.axes[Axis.SHARD, Lane.SPREAD].size > 1 and buffer.layout.encoded and buffer.master is not None
        return self.plan.wire.spread_difference and spreads

    def used_flag(self, index: int, slot: int) -> bool:
        """Whether any rank had a gradient for a parameter in this step."""
        return self.agree(measure=False).used[self._first_bit[index] + slot]

    def fragments(self) -> list[OwnedFragment]:
        """What this rank updates."""
        shard = self.axes[Axis.PARAMS, Lane.REDUCE].index
        return own_fragments(self.units, self.gradients, shard, self.axes[Axis.SHARD, Lane.REDUCE].index)

    @functools.cached_property
    def _sliced_fragments(self) -> list[OwnedFragment]:
        """Those of parameters that no other tensor-parallel rank holds."""
        return [owned for owned in self.fragments() if self.slices[owned.fragment.slot.name] is not None]

    def _number_parameters(self) -> list[int]:
        first, bits = 0, []
        for unit in self.units:
            bits.append(first)
            first += unit.info.parameters
        return bits

    def _squared_norm(self) -> float:
        """Squared norm of what this rank owns; replicas of a share, and what tensor-parallel ranks all hold, count
        once. One pass over memory."""
        if self.axes[Axis.REPLICA, Lane.SYNC].index != 0:
            return 0.0
        if self.part.tensor == 0:
            held = [g.owned.values for g in self.reducer.parts if not g.owned.empty]
        else:
            held = [owned.grad for owned in self._sliced_fragments if not owned.source.owned.empty]
        if not held:
            return 0.0
        # Sums of many squares in fp32 lose percents, and not the same under every plan: blocks add up in fp64.
        blocks = [block for values in held for block in values.view(-1).split(_NORM_BLOCK)]
        norms = torch.stack(torch._foreach_norm(blocks)).double()
        return float(norms.square().sum())

    def _exchange(self, payload: bytes, size: int) -> list[bytes]:
        """One small all-gather on the host, of so many bytes from each rank."""
        group = self.axes[Axis.WORLD, Lane.CONTROL]
        table = allocate(size * group.size, torch.uint8, torch.device("cpu"))
        row = torch.frombuffer(bytearray(payload.ljust(size, b"\0")), dtype=torch.uint8)
        table.view(group.size, -1)[group.index].copy_(row)
        all_gather(group, table).perform()
        if (journal := self.lanes.journal) is not None and group.size > 1:
            exchange = object()  # performed here and now: started and waited for at once
            journal.started(Lane.CONTROL, Load("control", Axis.WORLD), exchange, ())
            journal.waited(exchange)
        rows = table.view(group.size, -1)
        by_rank = [rows[_index_of(self.plan, rank)] for rank in range(group.size)]
        return [bytes(row.numpy()) for row in by_rank]


def _index_of(plan: Plan, rank: int) -> int:
    node, local = divmod(rank, plan.mesh.local)
    return local * plan.mesh.nodes + node


def _to_bits(flags: bytearray) -> bytes:
    bits = bytearray(-(-len(flags) // 64) * 8)
    for i, flag in enumerate(flags):
        if flag:
            bits[i // 8] |= 1 << (i % 8)
    return bytes(bits)


def write_back(buffer: FlatBuffer, index: int) -> None:
    """Cast this rank's masters into its part of the P shard (nothing to do where P is the master)."""
    if buffer.master is None:
        return
    position = 0
    for run in buffer.shares[index]:
        buffer.shard[run.start : run.start + run.length].copy_(buffer.master[position : position + run.length])
        position += run.length


def _spread(
    group: AxisGroup, buffer: FlatBuffer, kind: Kind, codec: Codec | None, update: torch.Tensor | None, seed: int
) -> Moves:
    """Gather all shares of a P shard, or their differences from ``update``, this rank's masters: in place where shares
    lie side by side, packed where they do not."""
    if kind is Kind.ALL_GATHER:
        return all_gather(group, buffer.shard, codec=codec, update=update, seed=seed)
    sizes = [sum(run.length for run in share) for share in buffer.shares]
    whole = allocate(sum(sizes), buffer.layout.dtype, buffer.shard.device)
    shares = list(enumerate(buffer.shares))
    packed = shares if update is not None else [shares[group.index]]
    unpacked = shares if codec is not None else [share for share in shares if share[0] != group.index]

    def pack() -> None:
        for owner, share in packed:
            offset = sum(sizes[:owner])
            for run in share:
                whole[offset : offset + run.length].copy_(buffer.shard[run.start : run.start + run.length])
                offset += run.length

    def unpack() -> None:
        for owner, share in unpacked:
            offset = sum(sizes[:owner])
            for run in share:
                buffer.shard[run.start : run.start + run.length].copy_(whole[offset : offset + run.length])
                offset += run.length

    moves = all_gather(group, whole, sizes, kind, codec=codec, update=update, seed=seed)
    return moves.after(pack).then(unpack)


_RUNTIME = "_thinwire_runtime"


def attach(model: nn.Module, runtime: Runtime) -> None:
    """Remember a model's runtime."""
    object.__setattr__(model, _RUNTIME, runtime)


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
