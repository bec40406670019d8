"""Rates of published engines, whose codecs have speeds of their own, and what their host programs add to collectives.

Amazon's work on DeepSpeed for EFA (pull request 1453) names and removes flaws of the latter. DeepSpeed decided in
Python, at every module, which parameters to gather. It cut gradients into the ranks' parts tensor by tensor. An
allocator that ran out of blocks returned all of its memory, on one rank or another, while all other ranks waited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.cost import Efficiency, NominalRates, Work
from thinwire.program.wire import ITEMSIZE
from thinwire.spec import ClusterSpec


class EngineRates(NominalRates):
    """Nominal rates with the speeds of an engine's codecs.

    Args:
        cluster: The cluster.
        dtype: Dtype in which matrices are multiplied.
        efficiency: Shares of the nominal rates that the engine reaches.
        codecs: Bytes per second that codecs read when they encode and write when they decode, by family. All other
            codecs are bound by memory bandwidth.
        group: Of a cluster of unlike nodes, the number of the group whose nodes compute.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        dtype: str,
        efficiency: Efficiency,
        codecs: Mapping[str, float],
        group: int | None = None,
    ) -> None:
        super().__init__(cluster, dtype, efficiency, group)
        self._codecs = codecs

    def codec(self, work: Work) -> float:
        """At the speed of the codec's family, if the engine has one."""
        speed = self._codecs.get(work.codec.family)
        if speed is None:
            return super().codec(work)
        return (work.encoded + work.decoded) * ITEMSIZE[work.dtype] / speed


SMALL_TENSOR = 100_000
"""Number of elements below which ZeRO-3 keeps a tensor whole on every rank (``stage3_param_persistence_threshold``)."""


@dataclass(frozen=True)
class HostOverhead:
    """Seconds that the host adds to collectives.

    Attributes:
        decision: Seconds per gathered tensor, to decide what to gather and what to free.
        partition: Seconds per tensor and rank of a reduction, to assemble the parts of gradients one by one.
        flush: Seconds per byte that is gathered or reduced while some rank flushes its allocator.
        chance: Probability that one rank flushes its allocator; a single such rank stalls its whole group.
    """

    decision: float = 0.0
    partition: float = 0.0
    flush: float = 0.0
    chance: float = 0.0

    def gathering(self, tensors: int, size: float, ranks: int) -> float:
        """Seconds that a gather of ``tensors`` tensors with ``size`` bytes over ``ranks`` ranks waits for the host."""
        return self.decision * tensors + self._flushing(size, ranks)

    def reducing(self, tensors: int, size: float, ranks: int) -> float:
        """Seconds that a reduction waits for the host, likewise."""
        return self.partition * tensors * ranks + self._flushing(size, ranks)

    def _flushing(self, size: float, ranks: int) -> float:
        return self.flush * size * (1 - (1 - self.chance) ** ranks)


NO_STALLS = HostOverhead()
"""A host that adds no time."""
