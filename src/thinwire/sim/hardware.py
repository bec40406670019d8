"""Rates of published engines. Their efficiency depends on the batch, and their codecs have speeds of their own."""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.cost import Efficiency, ModelPart, NominalRates, Work
from thinwire.program.wire import ITEMSIZE
from thinwire.spec import ClusterSpec, Plan

__all__ = ["EngineRates"]


class EngineRates(NominalRates):
    """Nominal rates that also depend on the size of the micro-batch and on the speed of codecs.

    Args:
        cluster: The cluster.
        dtype: Dtype in which matrices are multiplied.
        efficiency: Shares of the nominal rates that the engine reaches; ``compute`` is that of a large micro-batch.
        fill: Tokens of computation that each pass through a unit costs in addition to the micro-batch, whatever its
            size. They stand for kernels too small to fill the processor, for reading weights, and for allocating and
            freeing buffers.
        codecs: Bytes per second that codecs read when they encode and write when they decode, by family. All other
            codecs are bound by memory bandwidth.
    """

    def __init__(
        self, cluster: ClusterSpec, dtype: str, efficiency: Efficiency, fill: float, codecs: Mapping[str, float]
    ) -> None:
        super().__init__(cluster, dtype, efficiency)
        self._fill, self._codecs = fill, codecs

    def forward(self, part: ModelPart, plan: Plan, seq: int) -> float:
        """FLOPs of the micro-batch and of the additional tokens, at the engine's share of the peak."""
        return super().forward(part, plan, seq) * (1 + self._fill / (plan.micro_batch * seq))

    def codec(self, work: Work) -> float:
        """At the speed of the codec's family, if the engine has one."""
        speed = self._codecs.get(work.codec.family)
        if speed is None:
            return super().codec(work)
        return (work.encoded + work.decoded) * ITEMSIZE[work.dtype] / speed
