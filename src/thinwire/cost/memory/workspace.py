"""Bytes of what a rank holds for a while in a step: gathered units, and gradients on their way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple, final

from thinwire.program import (
    UNDER_WAY,
    Axis,
    UnitInfo,
    any_gathered,
    axis_shape,
    buckets,
    default_trace,
    gathered_peak,
    reduction_batches,
)
from thinwire.program.wire import ITEMSIZE, Encoding, reduction_encodings, used_codec
from thinwire.spec import Plan


class _BucketShape(NamedTuple):
    """What travels together to the owners of optimizer states.

    Attributes:
        numel: Elements of a shard of ``P``.
        alone: Whether it is one gradient, so that sums are written where gradients accumulate, if that is in fp32.
    """

    numel: int
    alone: bool


@final
class Workspace:
    """What a rank holds for a while, under any plan of the same units. Plans share what they cut alike.

    Args:
        units: Units of the rank.
    """

    def __init__(self, units: Sequence[UnitInfo]) -> None:
        self._units = units
        self._numels = [sum(buffer.numel for buffer in unit.buffers if buffer.trainable) for unit in units]
        self._order = range(len(units) - 1, -1, -1)
        self._batches: dict[tuple[int, int], Sequence[tuple[int, ...]]] = {}
        self._buckets: dict[tuple[int, int, int], Sequence[_BucketShape]] = {}
        self._window = cache(self._of_window)

    def both(self, plan: Plan) -> int:
        """Bytes of :meth:`gathered` and :meth:`buffers`: they do not depend on the size of a micro-batch, and on their
        number and on how ``G`` is cut only by whether gradients are :func:`staged`."""
        return self.gathered(plan) + self.buffers(plan)

    def gathered(self, plan: Plan) -> int:
        """Bytes of the units that computation and prefetch hold at once, and of those that stay gathered until
        backward. Units of one block are prefetched together."""
        if not any_gathered(plan, self._units):
            return 0
        if plan.gathers_by_bytes or not plan.gathers:  # some units are decoded, and others whole
            return gathered_peak(plan, self._units, default_trace(self._units, recompute=plan.recompute))
        return self._window(1 + max(1, plan.prefetch))

    def _of_window(self, ahead: int) -> int:
        """Most bytes of so many successive blocks, or of two beside the last, with the root."""
        units = self._units
        around = units[0].nbytes if units[0].name == "" else 0
        blocks: dict[int, int] = {}
        for unit in units[1:] if units[0].name == "" else units:
            blocks[unit.block] = blocks.get(unit.block, 0) + unit.nbytes
        inner = list(blocks.values())
        pairs = max(_sums(inner, 2)) if len(inner) > 1 else 0
        return around + max(*_sums(inner, ahead), inner[-1] + pairs)

    def buffers(self, plan: Plan) -> int:
        """Bytes of one unit's gradients before they are reduced, of a bucket that is filling up, of reductions in
        flight, and of encoded messages."""
        produced = ITEMSIZE[plan.compute_dtype] * max(self._numels)
        if plan.world == 1:
            return produced
        total = _spread_bytes(plan, sum(self._numels) // plan.params.ranks)
        if plan.params.ranks > 1:
            batches = self._reduced_together(plan)
            of_batch = {  # blocks are alike
                batch: (ITEMSIZE[plan.compute_dtype] * sum(batch), _scattered_together(plan, batch))
                for batch in set(batches)
            }
            total += _most_at_once([of_batch[batch] for batch in batches], UNDER_WAY if plan.overlap.reduce else 1)
            total += max((_received(plan, Axis.PARAMS, sum(batch)) for batch in of_batch), default=0)
        else:
            total += produced
        if plan.params.ranks < plan.world:
            filled = self._filled_together(plan)
            of_bucket = {
                bucket: (ITEMSIZE[plan.effective_reduce_dtype] * bucket.numel, _reduced(plan, bucket))
                for bucket in set(filled)
            }
            total += _most_at_once([of_bucket[bucket] for bucket in filled], UNDER_WAY if plan.overlap.sync else 1)
            axis = Axis.SHARD if plan.optimizer != plan.params else Axis.REPLICA
            total += max((_received(plan, axis, bucket.numel) for bucket in of_bucket), default=0)
        return total

    def _reduced_together(self, plan: Plan) -> Sequence[tuple[int, ...]]:
        """Elements of each unit of each reduction over the ranks of ``P``, in order."""
        key = ITEMSIZE[plan.effective_reduce_dtype], plan.reduce_bytes
        if key not in self._batches:
            self._batches[key] = [
                tuple(self._numels[unit] for unit in batch)
                for batch in reduction_batches(plan, self._units, self._order)
            ]
        return self._batches[key]

    def _filled_together(self, plan: Plan) -> Sequence[_BucketShape]:
        """The buckets, in order."""
        key = plan.params.ranks, ITEMSIZE[plan.effective_reduce_dtype], plan.bucket_bytes
        if key not in self._buckets:
            self._buckets[key] = [
                _BucketShape(
                    sum(self._numels[unit] for unit in bucket) // plan.params.ranks,
                    sum(buffer.trainable for unit in bucket for buffer in self._units[unit].buffers) == 1,
                )
                for bucket in buckets(plan, self._units, self._order)
            ]
        return self._buckets[key]


def staged(plan: Plan) -> bool:
    """Whether whole gradients of a micro-batch leave from memory of their own, and not from what the step accumulates:
    those of a single micro-batch, or of each if ``G`` is sharded like ``OS``."""
    leaves_in_each = plan.optimizer.ranks > 1 and plan.grads_like_optimizer
    return plan.params.ranks == 1 and (plan.micro_batches == 1 or leaves_in_each)


def _sums(sizes: Sequence[int], length: int) -> list[int]:
    """Sums of so many successive sizes, from each one on; fewer at the end."""
    before = [0, *accumulate(sizes)]
    return [before[min(index + length, len(sizes))] - before[index] for index in range(len(sizes))]


def _most_at_once(sizes: Sequence[tuple[int, int]], under_way: int) -> int:
    """Most bytes of a sequence of reductions, of which one is prepared while those before it are in flight.

    Args:
        sizes: Bytes that each of them prepares, and that it sends.
        under_way: Number of reductions in flight.
    """
    before = [0, *accumulate(sent for _, sent in sizes)]
    flying = [before[index] - before[max(0, index - under_way)] for index in range(len(sizes) + 1)]
    return max(made + flown for (made, _), flown in zip((*sizes, (0, 0)), flying, strict=True))


def _scattered_together(plan: Plan, numels: Sequence[int]) -> int:
    """Bytes of gradients of several units in a reduce-scatter over the params axis, with copies: chunks, and gradients
    of several units, are packed, and the sums of several units are unpacked."""
    numel = sum(numels)
    packed = ITEMSIZE[plan.effective_reduce_dtype] * numel if plan.bucket_chunks > 1 or len(numels) > 1 else 0
    sums = 4 * numel // plan.params.ranks if len(numels) > 1 else 0
    return packed + sums + _scattered(plan, Axis.PARAMS, numel)


def _scattered(plan: Plan, axis: Axis, numel: int) -> int:
    """Bytes of gradients in a reduce-scatter, of the messages that it sends and receives, and of a node's sums between
    its hops. What a hop without a codec receives does not count: it is one hop's at a time."""
    local, nodes = axis_shape(plan, axis)
    encodings = reduction_encodings(plan, axis)
    values = ITEMSIZE[plan.effective_reduce_dtype] * numel
    if local == 1 or nodes == 1:
        return values + _messages(encodings.inside if nodes == 1 else encodings.across, numel, local * nodes)
    column = numel // local
    messages = _messages(encodings.inside, numel, local) + _messages(encodings.across, column, nodes)
    if encodings.recodes and not plan.wire.error_feedback:
        return values + messages + 4 * column // nodes
    return values + messages + ITEMSIZE[encodings.across.dtype] * column


def _messages(encoding: Encoding, numel: int, members: int) -> int:
    """Bytes of the messages that a member sends to the others, and of those that it receives."""
    others = numel - numel // members
    return 0 if encoding.codec.is_none else 2 * encoding.codec.max_wire_bytes(others, encoding.dtype)


def _received(plan: Plan, axis: Axis, numel: int) -> int:
    """Bytes that the hops of a reduce-scatter receive where they have no codec."""
    local, nodes = axis_shape(plan, axis)
    encodings = reduction_encodings(plan, axis)
    inside = (numel - numel // local) if encodings.inside.codec.is_none else 0
    across = (numel - numel // nodes) // local if encodings.across.codec.is_none else 0
    return ITEMSIZE[plan.effective_reduce_dtype] * (inside + across)


def _reduced(plan: Plan, bucket: _BucketShape) -> int:
    """Bytes of a bucket in a reduce-scatter over the ranks that share OS, in an all-reduce over replicas, or in both: a
    reduce-scatter in wire dtype then, and a sum of replicas."""
    total, numel, ranks = 0, bucket.numel, plan.optimizer.ranks // plan.params.ranks
    if staged(plan):
        total += ITEMSIZE[plan.compute_dtype] * numel  # until their lane has packed them
    sums = 0 if bucket.alone and plan.accumulate_dtype == "float32" else 4
    if ranks > 1:
        total += _scattered(plan, Axis.SHARD, numel)
        numel //= ranks
    if plan.optimizer.ranks < plan.world:
        total += _all_reduced(plan, numel)
    return total + sums * numel


def _all_reduced(plan: Plan, numel: int) -> int:
    """Bytes of gradients in an all-reduce over replicas, and of its messages."""
    local, nodes = axis_shape(plan, Axis.REPLICA)
    farthest = reduction_encodings(plan, Axis.REPLICA).gather
    gathered = 0 if farthest.codec.is_none else farthest.codec.max_wire_bytes(numel, farthest.dtype)
    if local * nodes == 2 and gathered:  # two members exchange whole vectors
        return ITEMSIZE[plan.effective_reduce_dtype] * numel + 2 * gathered
    return _scattered(plan, Axis.REPLICA, numel) + gathered


def _spread_bytes(plan: Plan, shard: int) -> int:
    """Bytes of the messages of all spread parameters: the optimizer updates every unit before the first is sent."""
    codec = used_codec(plan, "spread")
    return 0 if codec.is_none or plan.optimizer == plan.params else codec.max_wire_bytes(shard, plan.compute_dtype)
