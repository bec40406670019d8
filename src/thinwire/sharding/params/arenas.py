"""Lays out the flat buffers of a model, carves them from one allocation for each kind of shard, and provides their
initial values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from thinwire.agreement import NOTHING
from thinwire.codecs import Codec
from thinwire.collectives.group import Control
from thinwire.collectives.memory import allocate
from thinwire.collectives.topology import AxisGroup
from thinwire.errors import MismatchError, ThinwireError
from thinwire.program import Axis, Lane, axis_index
from thinwire.program.wire import frozen_codec, is_excluded, rounds_parameters, separates
from thinwire.sharding.memory.initial import InitialValues, read_shard
from thinwire.sharding.memory.layout import FlatLayout, Run, deal_shares, even_shares, lay_out
from thinwire.sharding.memory.local import LocalPart, Slice, local_tensor, slice_of
from thinwire.sharding.modules.discover import UnitModules
from thinwire.sharding.modules.quantized import keeps_bits
from thinwire.sharding.params.flat_buffer import FlatBuffer
from thinwire.sharding.params.stored_shard import StoredShard
from thinwire.spec import CodecSpec, Plan

_TOGETHER = 1 << 18
"""Elements of small buffers that are broadcast together."""


@dataclass
class Flat:
    """A flat buffer that has a layout but no memory yet; ``shares`` is empty for frozen parameters."""

    unit: int
    layout: FlatLayout
    parameters: list[nn.Parameter]
    shares: tuple[tuple[Run, ...], ...] = ()


def draw(modules: Sequence[UnitModules], plan: Plan, rank: int) -> list[Flat]:
    """Lay out the flat buffers of all units, with the shares of a rank's P shard."""
    flats, some = [], separates(plan)
    for number, unit in enumerate(modules):
        compute: torch.dtype = getattr(torch, plan.unit_dtype(unit.name))
        exact = plan.override(unit.name).codec is not None
        kinds: dict[tuple[bool, torch.dtype, bool, CodecSpec | None], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in unit.parameters:
            as_it_is = keeps_bits(parameter)
            dtype = compute if parameter.is_floating_point() and not as_it_is else parameter.dtype
            is_whole = slice_of(name, parameter) is None
            values = dtype.is_floating_point and not as_it_is
            encoded = values and not exact and not (some and is_excluded(plan, name, is_whole=is_whole))
            stored = None
            if not parameter.requires_grad and values:
                stored = frozen_codec(plan, unit.name, name, parameter.dim())
            kind = parameter.requires_grad, dtype, encoded and stored is None, stored
            kinds.setdefault(kind, []).append((name, parameter))
        # Encoded buffers come first, in the order of reductions.
        for (trainable, dtype, encoded, stored), named in sorted(kinds.items(), key=lambda kind: not kind[0][2]):
            shapes = [(name, local_tensor(p).shape) for name, p in named]
            layout = lay_out(shapes, plan, dtype, trainable=trainable, encoded=encoded, stored=stored)
            flats.append(Flat(number, layout, [p for _, p in named]))
    trained = [flat for flat in flats if flat.layout.trainable]
    for flat, shares in zip(trained, share_out([flat.layout for flat in trained], plan, rank), strict=True):
        flat.shares = shares
    return flats


def share_out(layouts: Sequence[FlatLayout], plan: Plan, rank: int) -> Sequence[tuple[tuple[Run, ...], ...]]:
    """The shares of a rank's P shards of trained buffers, for each buffer by position along the shard axis."""
    if plan.partition == "inter" and plan.optimizer != plan.params:
        return deal_shares(layouts, plan, axis_index(plan, Axis.PARAMS, rank))
    return [even_shares(layout, plan) for layout in layouts]


class Arenas:
    """One contiguous allocation for each kind of shard. Buffers are carved from it in order, without fragmentation."""

    def __init__(
        self,
        flats: Sequence[Flat],
        plan: Plan,
        axes: dict[tuple[Axis, Lane], AxisGroup],
        device: torch.device,
        host_memory: Callable[[int], torch.Tensor],
        stored: Codec | None,
    ) -> None:
        self.device, self._plan = device, plan
        self._params = axes[Axis.PARAMS, Lane.GATHER]
        self._secondary = axes.get((Axis.SECONDARY, Lane.GATHER))
        self._share = axes[Axis.SHARD, Lane.REDUCE].index
        self._stored = stored
        by_dtype: dict[torch.dtype, int] = {}
        for flat in flats:
            dtype, length = _kept(flat.layout)
            by_dtype[dtype] = by_dtype.get(dtype, 0) + length
        self._hosts_params = plan.residence.streams_params
        of_params = host_memory if self._hosts_params else None
        self._shards = {dtype: _Arena(numel, dtype, device, of_params) for dtype, numel in by_dtype.items()}
        self._seconds = (
            {
                dtype: _Arena(numel * self._params.size // self._secondary.size, dtype, device)
                for dtype, numel in by_dtype.items()
            }
            if self._secondary is not None
            else {}
        )
        owned = sum(self._owned(flat) for flat in flats if flat.layout.trainable)
        separate = sum(self._owned(flat) for flat in flats if self._has_master(flat.layout))
        residence, dtype = plan.residence, getattr(torch, plan.accumulate_dtype)
        self._masters = _Arena(separate, torch.float32, device, host_memory if residence.streams_states else None)
        on_host = residence.streams_gradients
        self._gradients = _Arena(owned, dtype, device, host_memory if on_host else None)
        self._local_gradients: _Arena | None = None  # locked memory, made now where a step is known to need it
        if on_host and plan.micro_batches > 1 and not plan.grads_like_optimizer:
            trained = sum(flat.layout.shard_numel for flat in flats if flat.layout.trainable)
            self._local_gradients = _Arena(trained, dtype, device, host_memory)

    def carve(self, flat: Flat, initial: torch.Tensor) -> FlatBuffer:
        """Place a flat buffer and fill this rank's part of it with the initial values of its P shard:
        ``[layout.shard_numel]``, in the parameters' dtype or wider."""
        layout = flat.layout
        kind, length = _kept(layout)
        shard, stored = self._shards[kind].carve(length), None
        if layout.stored is None:
            shard.copy_(initial)
        else:
            assert self._stored is not None
            stored = StoredShard(self._stored, layout, shard, self.device)
            stored.fill(initial)
        whole = self._params.size == 1 and not self._hosts_params and stored is None
        full = shard if whole else torch.empty(layout.numel, dtype=layout.dtype, device=self.device)
        secondary = None
        if self._secondary is not None:
            secondary = self._seconds[kind].carve(length * self._params.size // self._secondary.size)
        master = None
        if self._has_master(layout):
            master = self._masters.carve(self._owned(flat))
            runs = flat.shares[self._share]
            for run, values in zip(runs, master.split([run.length for run in runs]), strict=True):
                values.copy_(initial[run.start : run.start + run.length])
        visiting = None
        if self._hosts_params and layout.trainable:
            visiting = torch.empty(layout.shard_numel, dtype=layout.dtype, device=self.device)
        buffer = FlatBuffer(layout, flat.parameters, full, shard, flat.shares, secondary, master, visiting, stored)
        if stored is None and not layout.trainable:
            buffer.narrows = any(p.dtype.itemsize > layout.dtype.itemsize for p in flat.parameters)
        return buffer

    @property
    def gradients(self) -> torch.Tensor:
        """Memory of all gradients of this rank's shares."""
        return self._gradients.memory

    def carve_gradient(self, flat: Flat) -> torch.Tensor:
        """Memory for the gradient of this rank's share, in the plan's ``accumulate_dtype``."""
        return self._gradients.carve(self._owned(flat))

    def carve_local_gradient(self, flat: Flat) -> torch.Tensor:
        """Memory for the gradient of this rank's P shard, beside that of its share."""
        numel, dtype, arena = flat.layout.shard_numel, self.gradients.dtype, self._local_gradients
        return allocate(numel, dtype, self.gradients.device) if arena is None else arena.carve(numel)

    def _has_master(self, layout: FlatLayout) -> bool:
        return layout.trainable and has_own_masters(layout, self._plan)

    def _owned(self, flat: Flat) -> int:
        return sum(run.length for run in flat.shares[self._share])


def has_own_masters(layout: FlatLayout, plan: Plan) -> bool:
    """Whether the masters of a trained buffer have memory of their own, apart from the P shard."""
    rounds = layout.encoded and rounds_parameters(plan)
    return plan.residence.has_masters or layout.dtype != torch.float32 or rounds


def _kept(layout: FlatLayout) -> tuple[torch.dtype, int]:
    """What ranks keep of a P shard: dtype and number of elements."""
    if layout.stored is None:
        return layout.dtype, layout.shard_numel
    return torch.uint8, layout.stored.slot_bytes(layout.shard_numel, layout.dtype)


class _Arena:
    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        host_memory: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        if host_memory is None:
            self.memory = torch.zeros(numel, dtype=dtype, device=device)
        else:
            self.memory = host_memory(numel * dtype.itemsize).view(dtype).zero_()
        self._at = 0

    def carve(self, numel: int) -> torch.Tensor:
        self._at += numel
        return self.memory[self._at - numel : self._at]


@dataclass
class InitialShards:
    """Provides the initial values of the P shards with index ``shard``, one of the ``flats`` after the other. They are
    the first rank's of ``control``, or this rank's own without it; ``values``, if the parameters do not hold them.
    """

    flats: Sequence[Flat]
    part: LocalPart
    control: Control | None
    values: InitialValues | None
    slices: Mapping[str, Slice | None]
    shard: int

    def __post_init__(self) -> None:
        self._problem: ThinwireError | None = None
        self._left = deque(self.flats)
        self._wholes: deque[torch.Tensor] = deque()  # values of the next buffers

    def __call__(self, flat: Flat) -> torch.Tensor:
        """Initial values, ``[flat.layout.shard_numel]``: fp32, or the buffer's dtype if that holds no
        floating-point values."""
        layout = flat.layout
        if self.values is None:
            begin = self.shard * layout.shard_numel
            return self._next_whole()[begin : begin + layout.shard_numel]
        if self._problem is None:
            try:
                return read_shard(layout, self.shard, self.values, self.slices)
            except ThinwireError as error:
                self._problem = error  # agree() raises it, because the other ranks continue until then
        return torch.zeros(layout.shard_numel, dtype=layout.dtype, device="cpu")

    def agree(self, control: Control) -> None:
        """Raise on every rank if any rank could not read its values.

        Raises:
            ThinwireError: The error of this rank, or a :class:`MismatchError` that quotes the error of another rank.
        """
        if self.values is None:
            return

        def raise_own() -> None:
            if self._problem is not None:
                raise self._problem

        def unread(problems: Mapping[int, str]) -> MismatchError:
            rank, text = next(iter(problems.items()))
            return MismatchError(f"rank {rank} cannot read its initial values: {text}")

        control.agree(raise_own, unread, NOTHING, raises_own=True)

    def _next_whole(self) -> torch.Tensor:
        """Initial values of the next whole buffer, taken from the first rank if ranks are synchronised."""
        if not self._wholes:
            together = [self._left.popleft()]
            dtype, device = _dtype(together[0]), together[0].parameters[0].device
            left = _TOGETHER - together[0].layout.numel
            while self._left and _dtype(self._left[0]) == dtype and self._left[0].layout.numel <= left:
                together.append(self._left.popleft())
                left -= together[-1].layout.numel
            values = torch.zeros(sum(flat.layout.numel for flat in together), dtype=dtype, device=device)
            self._wholes.extend(values.split([flat.layout.numel for flat in together]))
            for flat, whole in zip(together, self._wholes, strict=True):
                for slot, parameter in zip(flat.layout.slots, flat.parameters, strict=True):
                    value = self.part.masters.get(slot.name, parameter.detach())
                    whole[slot.offset : slot.offset + slot.numel].copy_(local_tensor(value).reshape(-1))
            if self.control is not None:
                self.control.broadcast(values)
        return self._wholes.popleft()


def _dtype(flat: Flat) -> torch.dtype:
    first = flat.parameters[0]
    has_values = first.is_floating_point() and not any(map(keeps_bits, flat.parameters))
    return torch.float32 if has_values else flat.layout.dtype
