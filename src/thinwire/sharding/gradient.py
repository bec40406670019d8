"""One unit's gradients on this rank: from autograd's tensors to the share that the optimizer reads.

Three buffers take part, each only where the plan needs it:

- ``staging``: the micro-batch's whole gradient in wire dtype, laid out like the parameters; lives until it is sent;
- ``local``: the gradient shard ``G`` that accumulates over micro-batches, where ``s_g = s_p < s_os``;
- ``owned``: the gradient of this rank's optimizer share; where ``s_g = s_os`` it is ``G``.

``local`` and ``owned`` have the plan's ``accumulate_dtype``. Each reduction is summed in fp32, added to the accumulator
in fp32, and rounded to that dtype once.

Every reduction is a mean (or a sum) over its axis and is added to what is there, so reductions stay right however often
a backward runs before the step. A mean of replicas may be averaged again; a sum is divided among them first.
"""

from __future__ import annotations

import math

import torch

from thinwire.collectives.memory import allocate
from thinwire.program import Axis, axis_shape
from thinwire.sharding.layout import FlatLayout, Run
from thinwire.spec import Plan

__all__ = ["Accumulator", "Topology", "UnitGradient"]


class Topology:
    """The sizes of the axes, and what follows from them for gradients."""

    def __init__(self, plan: Plan) -> None:
        self.params, self.shard, self.replica = (
            math.prod(axis_shape(plan, axis)) for axis in (Axis.PARAMS, Axis.SHARD, Axis.REPLICA)
        )
        self.scatter_always = self.shard > 1 and plan.grads_like_optimizer
        self.wire_dtype: torch.dtype = getattr(torch, plan.effective_reduce_dtype)
        self.accumulate_dtype: torch.dtype = getattr(torch, plan.accumulate_dtype)
        self.mean = plan.grad_reduce == "mean"

    def scale(self, size: int) -> float:
        """Factor of a reduction over ``size`` ranks."""
        return 1.0 / size if self.mean else 1.0


class Accumulator:
    """A buffer that knows whether it still holds nothing.

    Args:
        values: 1-D tensor; its content is undefined while ``empty``.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.empty = True

    def claim(self) -> bool:
        """Announce a write: whether to add (``True``) or to overwrite (``False``)."""
        accumulate, self.empty = not self.empty, False
        return accumulate


class UnitGradient:
    """The gradient of one of a unit's trainable buffers.

    Args:
        unit: number of the unit.
        name: of the unit, for timelines.
        first_slot: number that the unit's parameters have before this buffer's.
        layout: the buffer.
        shares: the optimizer ranks' shares of this rank's P shard.
        owned: memory for the gradient of this rank's share, 1-D, in the plan's ``accumulate_dtype``.
        topology: axis sizes.
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
        # Dealt shares may also be one run each and cover the shard, but out of order or of unequal length.
        length = layout.shard_numel // len(shares)
        self.even = all(share == (Run(i * length, length),) for i, share in enumerate(shares))
        self.owned = Accumulator(owned)
        self.staging: torch.Tensor | None = None
        self.unsynced = False
        self.synchronised = False  # ``owned`` is a sum over the replicas, and the next one will include it
        self._local: Accumulator | None = self.owned if topology.shard == 1 else None
        self._seen: set[int] = set()
        self._into_local = False

    @property
    def local(self) -> Accumulator:
        """The gradient shard ``G`` where it is not sharded like the optimizer; allocated when first accumulated."""
        if self._local is None:
            device = self.owned.values.device
            self._local = Accumulator(allocate(self.layout.shard_numel, self.topology.accumulate_dtype, device))
        return self._local

    @property
    def has_local(self) -> bool:
        """Whether ``G`` of its own holds something."""
        return self._local is not None and not self._local.empty

    @property
    def complete(self) -> bool:
        """Whether every parameter has delivered its gradient in this backward."""
        return len(self._seen) == len(self.layout.slots)

    @property
    def started(self) -> bool:
        """Whether any parameter has delivered since the last reduction."""
        return bool(self._seen)

    def collect(self, index: int, grad: torch.Tensor, *, last: bool) -> None:
        """Take the gradient of parameter ``index``; the caller then drops autograd's tensor.

        Args:
            index: slot of the parameter.
            grad: its gradient, in the parameter's shape.
            last: whether this is the step's last micro-batch.
        """
        if not self._seen:
            self._begin(last=last)
        slot = self.layout.slots[index]
        target = self.local.values if self._into_local else self.staging
        assert target is not None
        place = target.as_strided(slot.shape, slot.strides, target.storage_offset() + slot.offset)
        if index in self._seen or (self._into_local and not self.local.empty):
            place.add_(grad)
        else:
            place.copy_(grad)
        self._seen.add(index)

    def finish(self, *, last: bool) -> torch.Tensor:
        """Close the micro-batch: parameters without a gradient count as zero.

        Returns:
            The whole gradient on this rank: ``staging`` (wire dtype), or ``local`` where it accumulates at home.
        """
        if not self._seen:
            self._begin(last=last)
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
        """Drop what a failed backward delivered so far. Where it went home into ``local``, that is lost with it: zero
        the gradients and take the step's micro-batches again."""
        if self._into_local and self._seen:
            self.local.empty = True
        self.staging = None
        self._seen.clear()

    def reset(self) -> None:
        """Forget every gradient (``zero_grad``)."""
        self.owned.empty = True
        if self._local is not None:
            self._local.empty = True
        self.drop()
        self.unsynced = self.synchronised = False

    def _begin(self, *, last: bool) -> None:
        """Decide where this micro-batch's gradients go.

        Where P is whole and G is not sharded like OS they are added up at home, except when the step's only
        micro-batch can go to the wire at once.
        """
        topology = self.topology
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
        buffer[self.layout.payload :].zero_()
