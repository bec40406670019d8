"""One unit's gradients on this rank: from autograd's tensors to the share that the optimizer reads.

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
from typing import Final

import torch

from thinwire.collectives.memory import allocate
from thinwire.collectives.streams import streams_of
from thinwire.program import Axis, axis_shape
from thinwire.sharding.memory.layout import FlatLayout, Run
from thinwire.spec import Plan

__all__ = ["Accumulator", "Topology", "UnitGradient"]

_CONVERTED: Final = 1 << 20
"""Most elements of a gradient that are converted to the dtype of the sum at once."""


class Topology:
    """The sizes of the axes, and the scales of reductions that follow from them."""

    def __init__(self, plan: Plan) -> None:
        self.params, self.shard, self.replica = (
            math.prod(axis_shape(plan, axis)) for axis in (Axis.PARAMS, Axis.SHARD, Axis.REPLICA)
        )
        self.scatter_always = self.shard > 1 and plan.grads_like_optimizer
        self.wire_dtype: torch.dtype = getattr(torch, plan.effective_reduce_dtype)
        self.accumulate_dtype: torch.dtype = getattr(torch, plan.accumulate_dtype)
        self.mean = plan.grad_reduce == "mean"

    def scale(self, size: int) -> float:
        """Factor that scales a sum over ``size`` ranks."""
        return 1.0 / size if self.mean else 1.0


class Accumulator:
    """A buffer that keeps track of whether it is empty.

    Args:
        values: 1-D tensor; its content is undefined while the accumulator is ``empty``.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.empty = True

    def claim(self) -> bool:
        """Announce a write; returns whether to add to the content (``True``) or to overwrite it (``False``)."""
        accumulate, self.empty = not self.empty, False
        return accumulate


class _Copies:
    """Gradients that are still to be copied to their places, all in one launch."""

    def __init__(self) -> None:
        self._places: list[torch.Tensor] = []
        self._grads: list[torch.Tensor] = []

    def put(self, place: torch.Tensor, grad: torch.Tensor) -> None:
        """Copy a gradient to a place of its shape later."""
        self._places.append(place)
        self._grads.append(grad)

    def perform(self, *, add: bool) -> None:
        """Copy the gradients, or add them to what is at their places."""
        if self._places:
            (torch._foreach_add_ if add else torch._foreach_copy_)(self._places, self._grads)
            self.clear()

    def clear(self) -> None:
        """Drop the gradients."""
        self._places, self._grads = [], []


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

    Args:
        unit: Number of the unit.
        name: Name of the unit, for timelines.
        first_slot: Number of parameters in the unit's earlier buffers.
        layout: Layout of the buffer.
        shares: Shares of this rank's P shard, by optimizer rank.
        owned: Memory for the gradient of this rank's share, 1-D, in the plan's ``accumulate_dtype``.
        topology: Sizes of the axes.
    """

    def __init__(
        self,
        unit: int,
        name: str,
        first_slot: int,
        layout: FlatLayout,
        shares: tuple[tuple[Run, ...], ...],
        owned: torch.Tensor,
        topology: Topology,
    ) -> None:
        self.unit, self.name, self.first_slot = unit, name, first_slot
        self.layout, self.shares, self.topology = layout, shares, topology
        self.share_sizes = tuple(sum(run.length for run in share) for share in shares)
        # Whole-tensor shares may also be one run each and cover the shard, but out of order or with unequal lengths.
        length = layout.shard_numel // len(shares)
        self.even = all(share == (Run(i * length, length),) for i, share in enumerate(shares))
        self.owned = Accumulator(owned)
        self.staging: torch.Tensor | None = None
        self.unsynced = False
        self.synchronised = False  # whether ``owned`` is a sum over the replicas, which the next sum will include
        self._local: Accumulator | None = self.owned if topology.shard == 1 else None
        self._seen: set[int] = set()
        self._forgotten: set[int] = set()  # slots forgotten since gradients came last
        self._into_local = False
        # On a device with streams, a unit's gradients are copied in one launch, once all of them are there.
        self._copies = None if streams_of(owned.device) is None else _Copies()

    @property
    def local(self) -> Accumulator:
        """The gradient shard ``G`` if it is not sharded like the optimizer; allocated on first use."""
        if self._local is None:
            device = self.owned.values.device
            self._local = Accumulator(allocate(self.layout.shard_numel, self.topology.accumulate_dtype, device))
        return self._local

    @property
    def has_local(self) -> bool:
        """Whether a separate ``G`` exists and is not empty."""
        return self._local is not None and not self._local.empty

    @property
    def complete(self) -> bool:
        """Whether every parameter has delivered its gradient in this backward."""
        return len(self._seen) == len(self.layout.slots)

    @property
    def started(self) -> bool:
        """Whether any parameter has delivered its gradient since the last reduction."""
        return bool(self._seen)

    def collect(self, index: int, grad: torch.Tensor, *, last: bool) -> None:
        """Take the gradient of parameter ``index``; the caller then drops autograd's tensor.

        Args:
            index: Slot of the parameter.
            grad: Gradient, in the parameter's shape.
            last: Whether this is the step's last micro-batch.
        """
        if not self._seen:
            self._begin(last=last)
        slot = self.layout.slots[index]
        target = self.local.values if self._into_local else self.staging
        assert target is not None
        place = target.as_strided(slot.shape, slot.strides, target.storage_offset() + slot.offset)
        accumulates = self._into_local and not self.local.empty
        if self._copies is not None and index in self._seen:
            self._copies.perform(add=accumulates)
        if self._copies is not None and index not in self._seen:
            self._copies.put(place, grad)
        elif accumulates or index in self._seen:
            _add(place, grad)
        else:
            place.copy_(grad)
        self._seen.add(index)

    def finish(self, *, last: bool) -> torch.Tensor:
        """Close the micro-batch: parameters without a gradient count as zero.

        Returns:
            The whole gradient on this rank: ``staging`` (wire dtype), or ``local`` if gradients accumulate there.
        """
        if not self._seen:
            self._begin(last=last)
        if self._copies is not None:
            self._copies.perform(add=self._into_local and not self.local.empty)
        if self._into_local:
            local = self.local
            if local.empty:
                self._zero_missing(local.values)
            local.empty = False
            self._seen.clear()
            return local.values
        staging = self.staging
        assert staging is not None
        self._zero_missing(staging)
        self.staging = None
        self._seen.clear()
        return staging

    def drop(self) -> None:
        """Drop the gradients that a failed backward has delivered. If they were added to ``local``, its earlier content
        is lost as well: zero the gradients and repeat the step's micro-batches."""
        if self._into_local and self._seen:
            self.local.empty = True
        self.staging = None
        self._seen.clear()
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
        """Forget the gradient of parameter ``index`` (``parameter.grad = None``).

        Args:
            index: slot of the parameter.
            owned: its elements in ``owned``.
            shard: its elements in this rank's P shard.
        """
        self._forgotten.add(index)
        if len(self._forgotten) == len(self.layout.slots):
            self.reset()
            return
        if not self.owned.empty:
            self.owned.values[owned].zero_()
        if self.topology.shard > 1 and self.has_local:
            self.local.values[shard].zero_()

    def add(self, owned: slice, values: torch.Tensor) -> None:
        """Add to the gradient that ranks have combined; the caller has waited for it.

        Args:
            owned: elements of ``owned``.
            values: what to add to them, 1-D.
        """
        if self.owned.claim():
            self.owned.values[owned].add_(values)
            return
        self.owned.values.zero_()
        self.owned.values[owned].copy_(values)

    @property
    def absent(self) -> bool:
        """Whether no parameter has a gradient, on any rank."""
        return self.owned.empty and not self.unsynced

    def _begin(self, *, last: bool) -> None:
        """Choose the buffer for this micro-batch's gradients.

        If P is not sharded and G is not sharded like OS, gradients accumulate in ``local``, unless the step's only
        micro-batch can be sent at once.
        """
        topology = self.topology
        self._forgotten.clear()
        if self.synchronised and not topology.mean:
            self.owned.values.mul_(1.0 / topology.replica)
        self.synchronised = False
        at_home = topology.params == 1 and not topology.scatter_always
        networked = topology.shard > 1 or topology.replica > 1
        self._into_local = at_home and not (last and networked and not self._holds_something())
        if not self._into_local:
            self.staging = allocate(self.layout.numel, topology.wire_dtype, self.owned.values.device)

    def _holds_something(self) -> bool:
        return self._local is not None and not self._local.empty

    def _zero_missing(self, buffer: torch.Tensor) -> None:
        for index, slot in enumerate(self.layout.slots):
            if index not in self._seen:
                buffer[slot.offset : slot.offset + slot.numel].zero_()
        for gap in self.layout.gaps:
            buffer[gap].zero_()
