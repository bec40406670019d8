"""One unit's gradients on this rank: from autograd's tensors to the share that the optimizer reads, in fragments of
parameters: shares of P shards, cut where parameters end.

There are three buffers, each allocated only if the plan needs it:

- ``staging``: the micro-batch's whole gradient in wire dtype, laid out like the parameters; freed once it is sent;
- ``local``: the gradient shard ``G`` that accumulates over micro-batches, if ``s_g = s_p < s_os``;
- ``owned``: the gradient of this rank's optimizer share; if ``s_g = s_os``, it is ``G``.

``local`` and ``owned`` have the plan's ``accumulate_dtype``. Each reduction is summed in fp32, added to the accumulator
in fp32, and rounded to that dtype once.

Every reduction is a mean (or a sum) over its axis and is added to the buffer's content, so the result is right no
matter how many backwards run before the step. A mean over replicas may be averaged again; a sum is divided among them
first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from thinwire.collectives.links.streams import streams_of
from thinwire.collectives.memory import allocate
from thinwire.program import Axis, axis_shape
from thinwire.sharding.memory.layout import FlatLayout, Fragment, Run, Slot
from thinwire.sharding.params.flat_buffer import FlatBuffer
from thinwire.spec import Plan

_CONVERTED: Final = 1 << 20
"""Most elements of a gradient that are converted to the dtype of the sum at once."""

_TOGETHER: Final = 256 << 10
"""Most bytes of a buffer whose gradients wait for each other on a processor, where a larger one's would take memory."""


class Accumulator:
    """A buffer that keeps track of whether it is empty.

    Args:
        memory: 1-D tensor; its content is undefined while the accumulator is ``empty``.

    Attributes:
        memory: Where the values live between backwards.
        values: The values on the device, for whoever adds to them inside of a backward.
        kept: The values where they live, for whoever reads or writes them outside of a backward.
        shown: A copy of the values that the optimizer reads; ``None`` if it reads ``memory``.
        device: Device on which gradients are added.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = self.values = self.kept = memory
        self.device = memory.device
        self.shown: torch.Tensor | None = None
        self.empty = True

    def come_up(self) -> None:
        """Let values that live on the host come up, if there are any."""

    def claim(self) -> bool:
        """Announce a write; returns whether to add to the content (``True``) or to overwrite it (``False``)."""
        accumulate, self.empty = not self.empty, False
        return accumulate


class ReductionConfig:
    """The sizes of the axes, and the scales of reductions that follow from them."""

    def __init__(self, plan: Plan) -> None:
        self.params, self.shard, self.replica = (
            math.prod(axis_shape(plan, axis)) for axis in (Axis.PARAMS, Axis.SHARD, Axis.REPLICA)
        )
        self.scatter_always = self.shard > 1 and plan.grads_like_optimizer
        self.wire_dtype: torch.dtype = getattr(torch, plan.effective_reduce_dtype)
        self.mean = plan.grad_reduce == "mean"

    def scale(self, size: int) -> float:
        """Factor that scales a sum over ``size`` ranks."""
        return 1.0 / size if self.mean else 1.0


class _Copies:
    """Gradients that are still to be copied to their places, all at once.

    Args:
        layout: Layout of the buffer with the places.
        joins: Whether to join all gradients into one vector first, padding included. It takes memory for that, and is
            the faster way where every copy is a call; a device with streams copies as many in one launch.

    Attributes:
        whole: The gradients of all parameters, in order; empty as long as one is missing.
    """

    def __init__(self, layout: FlatLayout, *, joins: bool) -> None:
        self._layout, self._joins = layout, joins
        self._grads: dict[int, torch.Tensor] = {}
        self.whole: list[torch.Tensor] = []
        self._target: torch.Tensor | None = None
        self._targets: list[torch.Tensor] = []  # all places in that buffer, and then its padding
        self._paddings: dict[torch.dtype, list[torch.Tensor]] = {}  # by dtype, zeros for each gap of the layout

    def put(self, index: int, grad: torch.Tensor) -> None:
        """Copy the gradient of parameter ``index`` later."""
        grads = self._grads
        grads[index] = grad
        if len(grads) == len(self._layout.slots):
            self.whole, self._grads = [grads[index] for index in range(len(grads))], {}

    def perform(self, target: torch.Tensor, *, add: bool, stays: bool) -> bool:
        """Copy the gradients to their places in a buffer, or add them to what is there; ``stays`` says that the next
        ones go to the same buffer. Returns whether the whole buffer has its values now, its padding included."""
        grads, whole = self._grads, self.whole
        self._grads, self.whole = {}, []
        if whole:
            places = self._targets
            if target is not self._target:
                places = [_place(target, slot) for slot in self._layout.slots]
                places += [target[gap] for gap in self._layout.gaps]
                if stays:
                    self._target, self._targets = target, places
            if add:
                torch._foreach_add_(places[: len(whole)], whole)
            elif len(places) == len(whole):
                torch._foreach_copy_(places, whole)
            else:
                torch._foreach_copy_(places, [*whole, *self._zeros(whole[0])])
            return True
        if grads:
            copy = torch._foreach_add_ if add else torch._foreach_copy_
            copy([_place(target, self._layout.slots[index]) for index in grads], list(grads.values()))
        return False

    def joined(self, dtype: torch.dtype) -> torch.Tensor | None:
        """All gradients as one new vector of this dtype, padding included; ``None`` if they cannot be joined, and are
        still to be copied."""
        whole, gaps = self.whole, self._layout.gaps
        if not self._joins or not whole or len({dtype, *(grad.dtype for grad in whole)}) > 1:
            return None
        self.whole = []
        zeros = self._zeros(whole[0]) if gaps else []
        if len(gaps) > 1 or (gaps and gaps[0].stop != self._layout.numel):
            of_gaps = {gap.start: zero for gap, zero in zip(gaps, zeros, strict=True)}
            behind = [of_gaps.get(slot.offset + slot.numel) for slot in self._layout.slots]
            pieces = [piece for pair in zip(whole, behind, strict=True) for piece in pair if piece is not None]
        else:
            pieces = [*whole, *zeros]
        return torch._C._nn.flatten_dense_tensors(pieces)

    def clear(self) -> None:
        """Drop the gradients."""
        self._grads, self.whole = {}, []

    def _zeros(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Zeros for each gap of the layout, made once for each dtype."""
        zeros = self._paddings.get(like.dtype)
        if zeros is None:
            zeros = [like.new_zeros(gap.stop - gap.start) for gap in self._layout.gaps]
            self._paddings[like.dtype] = zeros
        return zeros


def _place(target: torch.Tensor, slot: Slot) -> torch.Tensor:
    """A parameter's elements in a flat buffer, in the parameter's shape."""
    return target.as_strided(slot.shape, slot.strides, target.storage_offset() + slot.offset)


def _add(total: torch.Tensor, grad: torch.Tensor) -> None:
    """Add a gradient to a sum. A processor converts a gradient of another dtype in memory of its own, so it gets a few
    rows at a time."""
    if total.dtype == grad.dtype or grad.numel() <= _CONVERTED:
        total.add_(grad)
        return
    rows = max(1, _CONVERTED * len(grad) // grad.numel())
    for part, addend in zip(total.split(rows), grad.split(rows), strict=True):
        part.add_(addend)


class UnitGradient:
    """The gradient of one of a unit's trainable buffers.

    Attributes:
        first_slot: Number of parameters in the unit's earlier buffers.
        shares: Shares of this rank's P shard, by optimizer rank.
        owned: Buffer for the gradient of this rank's share, in the plan's ``accumulate_dtype``.
        seen: Slots whose parameters have delivered their gradients since the last reduction.
    """

    def __init__(
        self,
        unit: int,
        name: str,
        first_slot: int,
        layout: FlatLayout,
        shares: tuple[tuple[Run, ...], ...],
        owned: Accumulator,
        make_local: Callable[[], Accumulator],
        topology: ReductionConfig,
    ) -> None:
        self.unit, self.name, self.first_slot = unit, name, first_slot
        self.layout, self.shares, self.topology = layout, shares, topology
        self.share_sizes = tuple(sum(run.length for run in share) for share in shares)
        # Whole-tensor shares may also be one run each and cover the shard, but out of order or with unequal lengths.
        length = layout.shard_numel // len(shares)
        self.even = all(share == (Run(i * length, length),) for i, share in enumerate(shares))
        self.owned, self._make_local = owned, make_local
        self.staging: torch.Tensor | None = None
        self.unsynced = False
        self.synchronised = False  # whether ``owned`` is a sum over the replicas, which the next sum will include
        self._local: Accumulator | None = self.owned if topology.shard == 1 else None
        self.seen: set[int] = set()
        self._forgotten: set[int] = set()  # slots forgotten since gradients came last
        self._into_local = False
        # Whether gradients of micro-batches may accumulate in ``local``, and whether a sum of ranks follows.
        self._at_home = topology.params == 1 and not topology.scatter_always
        self._networked = topology.shard > 1 or topology.replica > 1
        # Gradients are copied once all of them are there: in one launch on a device with streams, and where they are
        # small in one call. A large one is copied at once, so that autograd's memory is free again.
        joins = streams_of(owned.device) is None
        together = not joins or layout.numel * topology.wire_dtype.itemsize <= _TOGETHER
        self._copies = _Copies(layout, joins=joins) if together else None
        self._slots = range(first_slot, first_slot + len(layout.slots))
        self.waits = together

    @property
    def local(self) -> Accumulator:
        """The gradient shard ``G`` if it is not sharded like the optimizer; allocated on first use."""
        if self._local is None:
            self._local = self._make_local()
        return self._local

    @property
    def buffers(self) -> Sequence[Accumulator]:
        """What gradients have accumulated in."""
        return [self.owned] if self._local is None or self._local is self.owned else [self._local, self.owned]

    @property
    def has_local(self) -> bool:
        """Whether a separate ``G`` exists and is not empty."""
        return self._local is not None and not self._local.empty

    @property
    def complete(self) -> bool:
        """Whether every parameter has delivered its gradient in this backward."""
        return len(self.seen) == len(self.layout.slots)

    def collect_all(self, grads: Sequence[torch.Tensor], *, last: bool, late: bool) -> None:
        """Take the gradients of all parameters, out of those of the whole unit's, in order; see :meth:`collect`."""
        if self._copies is None or self.seen:
            for index, slot in enumerate(self._slots):
                self.collect(index, grads[slot], last=last, late=late)
            return
        self._begin(last=last, late=late)
        self._copies.whole = list(grads[self._slots.start : self._slots.stop])
        self.seen.update(range(len(self._slots)))

    def collect(self, index: int, grad: torch.Tensor, *, last: bool, late: bool) -> None:
        """Take the gradient of parameter ``index``, in the parameter's shape; the caller then drops autograd's tensor.
        ``last`` is the step's last micro-batch; ``late``, that the unit's turn in this backward is over."""
        seen = self.seen
        if not seen:
            self._begin(last=last, late=late)
        if self._copies is not None and index not in seen:
            self._copies.put(index, grad)
            seen.add(index)
            return
        target, accumulates = self._target()
        if self._copies is not None:
            self._copies.perform(target, add=accumulates, stays=self._into_local)
        place = _place(target, self.layout.slots[index])
        if accumulates or index in seen:
            _add(place, grad)
        else:
            place.copy_(grad)
        seen.add(index)

    def finish(self, *, last: bool, grads: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Close the micro-batch, which may be the step's last: parameters without a gradient count as zero. ``grads``
        are those of all parameters, in order, of which none has been collected, if they wait for each other.

        Returns:
            The whole gradient on this rank: ``staging`` (wire dtype), or ``local`` if gradients accumulate there.
        """
        if not self.seen:
            self._begin(last=last)
        if grads is not None:
            assert self._copies is not None  # they wait for each other there
            self._copies.whole = grads
        if not self._into_local and self._copies is not None:
            joined = self._copies.joined(self.topology.wire_dtype)
            if joined is not None:
                self.seen.clear()
                return joined
        target, accumulates = self._target()
        whole = self._copies is not None and self._copies.perform(target, add=accumulates, stays=self._into_local)
        if not accumulates and not whole:
            _zero_missing(target, self.layout, self.seen)
        if self._into_local:
            self.local.empty = False
        else:
            self.staging = None
        self.seen.clear()
        return target

    def expect_sum(self) -> None:
        """Let ``owned`` be part of another sum over the replicas; no reduction of it is in flight."""
        if self.synchronised and not self.topology.mean:
            self.owned.values.mul_(1.0 / self.topology.replica)
        self.synchronised = False

    def drop(self) -> None:
        """Drop the gradients that a failed backward has delivered. If they were added to ``local``, its earlier content
        is lost as well: zero the gradients and repeat the step's micro-batches."""
        if self._into_local and self.seen:
            self.local.empty = True
        self.staging = None
        self.seen.clear()
        if self._copies is not None:
            self._copies.clear()

    def reset(self) -> None:
        """Forget every gradient (``zero_grad``)."""
        self.owned.empty = True
        if self._local is not None:
            self._local.empty = True
        self.drop()
        self._forgotten.clear()
        self.unsynced = self.synchronised = False

    def forget(self, index: int, owned: slice, shard: slice) -> None:
        """Forget the gradient of parameter ``index`` (``parameter.grad = None``), which has these elements of
        ``owned`` and of this rank's P shard."""
        self._forgotten.add(index)
        if len(self._forgotten) == len(self.layout.slots):
            self.reset()
            return
        if not self.owned.empty:
            self.owned.kept[owned].zero_()
        if self.topology.shard > 1 and self.has_local:
            self.local.kept[shard].zero_()

    def add(self, index: int, owned: slice, values: torch.Tensor) -> None:
        """Add values, 1-D, to the gradient of parameter ``index`` that ranks have combined, in these elements of
        ``owned``; the caller has waited for it."""
        self._forgotten.discard(index)
        kept, adds = self.owned.kept, not self.owned.empty
        self.owned.empty = False
        if adds:
            kept[owned].add_(values)
            return
        kept.zero_()
        kept[owned].copy_(values)

    @property
    def absent(self) -> bool:
        """Whether no parameter has a gradient, on any rank."""
        return self.owned.empty and not self.unsynced

    def _begin(self, *, last: bool, late: bool = False) -> None:
        """Choose the buffer for this micro-batch's gradients.

        If P is not sharded and G is not sharded like OS, gradients accumulate in ``local``, unless the step's only
        micro-batch can be sent at once. In the last micro-batch, late gradients are sent by themselves: what ``local``
        holds may still wait for the rest of its bucket, and would be sent twice.
        """
        if self._forgotten:
            self._forgotten.clear()
        self.expect_sum()
        self._into_local = self._at_home and not (last and self._networked and (late or not self.has_local))

    def _target(self) -> tuple[torch.Tensor, bool]:
        """The buffer of this micro-batch's gradients, and whether they are added to its content."""
        if self._into_local:
            return self.local.values, not self.local.empty
        if self.staging is None:
            self.staging = allocate(self.layout.numel, self.topology.wire_dtype, self.owned.device)
        return self.staging, False


def _zero_missing(buffer: torch.Tensor, layout: FlatLayout, present: Collection[int]) -> None:
    """Zero what no gradient has written: gradients that are not present, by number of the parameter, and gaps."""
    for index, slot in enumerate(layout.slots) if len(present) < len(layout.slots) else ():
        if index not in present:
            buffer[slot.offset : slot.offset + slot.numel].zero_()
    for gap in layout.gaps:
        buffer[gap].zero_()


# -- what a rank updates ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnedFragment:
    """A fragment that this rank updates.

    Attributes:
        unit: Index of the fragment's unit.
        slot: Index of the fragment's parameter within the unit.
        fragment: Position of the fragment in the parameter and in the share.
        value: Master values that the optimizer updates, fp32; in the parameter's shape if the fragment is the whole
            parameter, otherwise 1-D.
        held: The same elements of the P shard, which ranks compute with; 1-D, in the compute dtype.
        grad: Gradient of the fragment in the plan's ``accumulate_dtype``, with the shape of ``value``.
        source: Gradient of the unit's buffer that ``grad`` is a part of.
        begin: First element in the share of that buffer.
    """

    unit: int
    slot: int
    fragment: Fragment
    value: nn.Parameter
    held: torch.Tensor
    grad: torch.Tensor
    source: UnitGradient
    begin: int

    @property
    def name(self) -> str:
        """Name of the fragment's parameter."""
        return self.fragment.slot.name

    @property
    def shown(self) -> torch.Tensor:
        """The gradient, where the optimizer reads it."""
        owned = self.source.owned
        if owned.shown is None:
            return self.grad
        return owned.shown[self.begin : self.begin + self.grad.numel()].view(self.grad.shape)


def fragments_of(buffer: FlatBuffer, part: UnitGradient, shard: int, share: int) -> list[OwnedFragment]:
    """The fragments of a trained buffer, with its gradient ``part``, in a rank's ``share`` of its P ``shard``, with
    views of their master values and gradients."""
    owned, position = [], 0
    for run in buffer.shares[share]:
        for fragment in buffer.layout.fragments(shard, [run]):
            begin, start = position + fragment.position, run.start + fragment.position
            held = buffer.shard[start : start + fragment.length]
            value = held if buffer.master is None else buffer.master[begin : begin + fragment.length]
            grad = part.owned.memory[begin : begin + fragment.length]
            if fragment.whole:
                value, grad = value.view(fragment.slot.shape), grad.view(fragment.slot.shape)
            slot = part.first_slot + buffer.layout.slots.index(fragment.slot)
            owned.append(OwnedFragment(part.unit, slot, fragment, nn.Parameter(value), held, grad, part, begin))
        position += run.length
    return owned
