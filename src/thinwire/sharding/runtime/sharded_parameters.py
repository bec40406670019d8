"""The parameters of a model outside of its forward and backward: shares of the masters, with their gradients.

Reads and writes of share tensors end in :class:`~thinwire.sharding.runtime.share_values.Masters` and
:class:`~thinwire.sharding.runtime.share_values.ShareGradients`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import torch

from thinwire.agreement import Typed
from thinwire.collectives.group import control
from thinwire.errors import UsageError
from thinwire.program import Axis, HostLane, Lane
from thinwire.sharding.grads.unit_gradient import OwnedFragment, UnitGradient
from thinwire.sharding.modules.quantized import is_packed
from thinwire.sharding.params.flat_buffer import FlatBuffer
from thinwire.sharding.params.param_group import Unit
from thinwire.sharding.params.write_audit import sum_of_bits
from thinwire.sharding.runtime.parameter import ModelParameter, ShardedParameter
from thinwire.sharding.runtime.share_values import Masters, ShareGradients, TrainedParameter
from thinwire.sharding.step.sharded_model import ShardedModel
from thinwire.sharding.tensors.spec import Holders, ShareSpec

_MANAGED = "_thinwire_share"
"""Attribute of a compute tensor that holds its share, which replaces it outside of passes."""

_NAMES: Final[Typed[set[str]]] = Typed(set[str])


def sharded_parameter_of(compute: torch.Tensor) -> ShardedParameter | None:
    """The share of a parameter that a module computes with; ``None`` if the parameter is not sharded."""
    share: ShardedParameter | None = getattr(compute, _MANAGED, None)
    return share


def forget_share(compute: torch.Tensor) -> None:
    """Remove the share of a parameter that is no longer sharded."""
    object.__delattr__(compute, _MANAGED)


class ShardedParameters:
    """The parameters of one model, as share tensors.

    Attributes:
        parameters: Share of each parameter, by name, in the order of units.
    """

    def __init__(self, sharded: ShardedModel, masters: Masters, gradients: ShareGradients) -> None:
        self._sharded, self._masters, self._gradients = sharded, masters, gradients
        self.parameters: dict[str, ShardedParameter] = {}
        trained, frozen = _holders(sharded, trained=True), _holders(sharded, trained=False)
        fragments = _by_name(sharded.fragments)
        for unit in sharded.units:
            parts = iter(sharded.gradients.get(unit.index, ()))
            for buffer in unit.buffers:
                if buffer.layout.trainable:
                    self._place_trained(unit, buffer, next(parts), fragments, trained)
                else:
                    self._place_frozen(unit, buffer, frozen)

    def train(self, buffers: Iterable[tuple[Unit, FlatBuffer, UnitGradient]], owned: Iterable[OwnedFragment]) -> None:
        """Let the shares of frozen parameters, whose buffers have got masters, be those of trained ones. Of them, this
        rank has the ``owned`` fragments."""
        holders, fragments = _holders(self._sharded, trained=True), _by_name(owned)
        for unit, buffer, part in buffers:
            self._place_trained(unit, buffer, part, fragments, holders)
            for slot, compute in buffer.named:
                self.parameters[slot.name].requires_grad_(compute.requires_grad)  # others of the buffer stay frozen

    @contextlib.contextmanager
    def carrying_writes(self, *, keep: bool) -> Iterator[None]:
        """Carry changes of whole parameters, which have just been gathered, into the masters at the end of this block.
        Collective, if they are to ``keep``.

        Raises:
            UsageError: There are changes, and ``keep`` is false.
        """
        buffers = [(unit, buffer) for unit in self._sharded.units for buffer in unit.buffers]
        before = {id(p): _mark(unit, p) for unit, buffer in buffers for p in buffer.parameters}
        yield
        moved = {id(p) for _, buffer in buffers for p, _ in buffer.moved()}
        fragments, changes = _by_name(self._sharded.fragments), dict[str, torch.Tensor]()
        for unit, (slot, compute) in ((unit, named) for unit, buffer in buffers for named in buffer.named):
            if _mark(unit, compute) == before[id(compute)] and id(compute) not in moved:
                continue
            if not keep:
                raise UsageError(
                    f"{slot.name} was written inside full_parameters(model), which would lose the change: use "
                    "full_parameters(model, write=True) on every rank"
                )
            # What ranks compute with; a codec may have left something else there than the masters.
            owned = fragments.get(slot.name) if unit.sharded else None
            changes[slot.name] = _changes(self.parameters[slot.name], None if owned is None else owned.held)
        if not keep:
            return
        for name in sorted(set().union(*self._sharded.part.control.all_gather_typed(set(changes), _NAMES))):
            share = self.parameters[name]
            if name in changes:
                whole, piece = share.live.compute_tensor.detach(), share.piece
                piece[changes[name]] = share.spec.cut(whole)[changes[name]].to(share.dtype)
            share.live.after_write()

    def _place_trained(
        self,
        unit: Unit,
        buffer: FlatBuffer,
        part: UnitGradient,
        fragments: dict[str, OwnedFragment],
        holders: Holders,
    ) -> None:
        of_shard = {slot.name: run for slot, _, run in buffer.layout.pieces(self._sharded.shard)}
        masters = buffer.shard if buffer.master is None else buffer.master
        for index, (slot, compute) in enumerate(buffer.named):
            owned = fragments.get(slot.name)
            if owned is None:
                piece, offset, mine = masters[:0].detach(), 0, slice(0, 0)
            else:
                piece, offset = owned.value.detach().reshape(-1), owned.fragment.offset
                mine = slice(owned.begin, owned.begin + owned.fragment.length)
            run = of_shard.get(slot.name)
            in_shard = slice(run.start, run.start + run.length) if run is not None else slice(0, 0)
            trained = TrainedParameter(unit.index, part.first_slot + index, part, index, mine, in_shard)
            holders.spans[slot.name] = (offset, piece.numel())
            spec = ShareSpec(slot.name, slot.shape, offset, piece.numel(), holders)
            self._add(ModelParameter(self._masters, self._gradients, unit, compute, trained), piece, spec)

    def _place_frozen(self, unit: Unit, buffer: FlatBuffer, holders: Holders) -> None:
        pieces = {slot.name: (offset, run) for slot, offset, run in buffer.layout.pieces(self._sharded.shard)}
        for slot, compute in buffer.named:
            offset, run = pieces.get(slot.name, (0, None))
            length = 0 if run is None else run.length
            holders.spans[slot.name] = (offset, length)
            spec = ShareSpec(slot.name, slot.shape, offset, length, holders)
            live = ModelParameter(self._masters, self._gradients, unit, compute, None)
            live.frozen_in = buffer
            if buffer.stored is not None:
                live.stored = buffer.stored.piece(run)
                like = torch.empty(0, dtype=buffer.layout.dtype, device=buffer.stored.device)
                self._add(live, live.stored, spec, like=like)
            else:
                piece = buffer.shard[:0] if run is None else buffer.values(run)
                self._add(live, piece.detach(), spec)

    def _add(
        self,
        live: ModelParameter,
        piece: torch.Tensor | Callable[[], torch.Tensor],
        spec: ShareSpec,
        *,
        like: torch.Tensor | None = None,
    ) -> None:
        trains = live.trained is not None
        if isinstance(piece, torch.Tensor) and trains and self._sharded.plan.residence.streams_states:
            settle, unit, like, on_host = self._sharded.lanes.settle, live.unit, piece, piece

            def settled() -> torch.Tensor:
                unit.take_update()
                settle(HostLane.DOWN)
                return on_host

            piece = settled

        share = ShardedParameter(piece, spec, live, requires_grad=trains, like=like)
        if (frozen := self.parameters.get(spec.name)) is not None:
            share = _become(frozen, share)
        live.share = share
        if trains:
            with torch._C.DisableTorchFunctionSubclass():
                torch.Tensor.register_post_accumulate_grad_hook(share, _accumulation_hook(live))
            self._gradients.shares.append((share, live.hooks))
        if is_packed(live.compute_tensor):  # a state dict has its scales beside its codes
            vars(share).update(vars(live.compute_tensor))
        self.parameters[spec.name] = share
        object.__setattr__(live.compute_tensor, _MANAGED, share)


def _holders(sharded: ShardedModel, *, trained: bool) -> Holders:
    """The data-parallel ranks, as holders of the pieces of trained parameters, which are cut like the optimizer's
    shares, or of frozen ones, which are cut like P."""
    axes, data = sharded.axes, control(sharded.part.data.ranks)
    params, shard, group = axes[Axis.PARAMS, Lane.REDUCE], axes[Axis.SHARD, Lane.REDUCE], axes[Axis.WORLD, Lane.CONTROL]
    pieces = params.size * shard.size if trained else params.size
    speaks = sharded.is_first_replica and (trained or shard.index == 0)
    summing, device = (group, torch.device("cpu")) if sharded.world is None else (sharded.world, sharded.device)
    return Holders(pieces, group, summing, device, data, speaks)


def _by_name(fragments: Iterable[OwnedFragment]) -> dict[str, OwnedFragment]:
    return {owned.name: owned for owned in fragments}


def _become(frozen: ShardedParameter, trained: ShardedParameter) -> ShardedParameter:
    """Let the share of a frozen parameter, which optimizers and others may hold, be that of a trained one. Masters may
    have another dtype, which a tensor keeps for its life.

    Raises:
        UsageError: A graph holds the share.
    """
    try:
        with torch._C.DisableTorchFunctionSubclass():
            torch.utils.swap_tensors(frozen, trained)
    except RuntimeError as error:
        raise UsageError(
            f"{trained.spec.name} is to be trained while a loss that has used it, or a weak reference, is alive: set "
            "requires_grad = True between steps"
        ) from error
    return frozen


def _mark(unit: Unit, compute: torch.Tensor) -> tuple[int, int]:
    """What a write to a whole parameter changes. torch does not count writes to ``.data``; they show in the values of
    copies of the masters."""
    return compute._version, int(sum_of_bits(compute)) if unit.computes_with_copies else 0


def _changes(share: ShardedParameter, held: torch.Tensor | None) -> torch.Tensor:
    """Mask of the changed elements of this rank's piece, of a parameter with changes. It had the values ``held``, by
    default its masters."""
    piece = share.spec.cut(share.live.compute_tensor.detach())
    original = (share.piece.detach() if held is None else held).to(piece)
    if original.data_ptr() == piece.data_ptr():  # the piece is the master, which has no other copy
        return torch.ones_like(piece, dtype=torch.bool)
    return (piece != original) & ~(piece.isnan() & original.isnan())


def _accumulation_hook(live: ModelParameter) -> Callable[[torch.Tensor], None]:
    # The garbage collector cannot see this kind of hook, so a strong reference would keep the model alive forever.
    alive = weakref.ref(live)

    def hook(share: torch.Tensor) -> None:
        if (owner := alive()) is not None:
            owner.accumulated(share)

    return hook
