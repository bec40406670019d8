"""Error feedback: what codecs rounded away from gradients, kept from step to step and added to the next ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from thinwire.collectives.all_reduce import Feedback, feedback_numels
from thinwire.collectives.messages import Residual
from thinwire.collectives.reduce_scatter import HopCodecs, residual_numel
from thinwire.collectives.topology import AxisGroup
from thinwire.program import Axis, padded
from thinwire.sharding.grads.buckets import Bucket
from thinwire.spec import Plan

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """Rounding errors of this rank's messages, which the next step adds.

    Args:
        plan: The plan.
        groups: Groups of ranks along the axes ``PARAMS``, ``SHARD`` and ``REPLICA``.

    Attributes:
        lost: Rounding errors, fp32, by reduction, chunk by chunk. Every rank has the same reductions, but sizes may
            differ.
    """

    def __init__(self, plan: Plan, groups: Mapping[Axis, AxisGroup]) -> None:
        self._wire, self._groups = plan.wire, groups
        self.lost: dict[str, torch.Tensor] = {}

    def of_scatter(self, axis: Axis, bucket: Bucket, number: int, codecs: HopCodecs) -> Residual | None:
        """Rounding errors so far of a reduce-scatter's last hop.

        Args:
            axis: Axis of the reduce-scatter.
            bucket: The bucket.
            number: Number of the chunk.
            codecs: Codecs of the hops.

        Returns:
            The errors; ``None`` without error feedback or with lossless codecs.
        """
        group = self._groups[axis]
        if not self._loses(group, codecs):
            return None
        numels = [residual_numel(group, chunk.sizes) for chunk in bucket.chunks]
        return self._residual(str(axis), bucket, numels, number)

    def of_sync(self, bucket: Bucket, number: int, codecs: HopCodecs) -> Feedback:
        """Rounding errors so far of an all-reduce over the replicas; see :meth:`of_scatter` for the arguments."""
        group = self._groups[Axis.REPLICA]
        if not self._loses(group, codecs):
            return Feedback()
        numels = [feedback_numels(group, padded(chunk.sizes[0], group.size)) for chunk in bucket.chunks]
        scattered, gathered = zip(*numels, strict=True)
        sums = self._residual("replica-sum", bucket, gathered, number) if group.size > 2 else None
        return Feedback(self._residual("replica", bucket, scattered, number), sums)

    def _loses(self, group: AxisGroup, codecs: HopCodecs) -> bool:
        """Whether the last hop along an axis rounds, and its errors are kept."""
        codec = codecs.across if group.nodes > 1 else codecs.inside
        return self._wire.error_feedback and codec is not None and not codec.spec.is_lossless

    def _residual(self, what: str, bucket: Bucket, numels: Sequence[int], number: int) -> Residual | None:
        """Rounding errors of a chunk; ``numels`` are the numbers of elements that the last hop encodes, by chunk."""
        key = f"{what}/{'-'.join(str(part.unit) for part in bucket.gradients)}"
        lost = self.lost.get(key)
        if lost is None or lost.numel() != sum(numels):
            lost = self.lost[key] = torch.zeros(sum(numels), device=bucket.chunks[0].device)
        if not numels[number]:
            return None
        begin = sum(numels[:number])
        return Residual(lost[begin : begin + numels[number]], self._wire.feedback_gain)
