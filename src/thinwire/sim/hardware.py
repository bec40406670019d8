"""Rates of published engines: what they reach depends on the batch, and their codecs have speeds of their own."""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.cost import Efficiency, ModelPart, NominalRates, Work
from thinwire.program.wire import ITEMSIZE
from thinwire.spec import ClusterSpec, Plan

__all__ = ["EngineRates"]


class EngineRates(NominalRates):
    """Nominal rates with two more causes.

    Args:
        cluster: the cluster.
        dtype: in which matrices are multiplied.
        efficiency: shares of the nominal rates; ``compute`` is that of a large micro-batch.
        fill: tokens of computation that a visit of a unit costs besides those of the micro-batch, whatever its size:
            kernels too small to fill the processor, weights read, buffers taken and given back.
        codecs: bytes per second that codecs read when they encode and write when they decode, by family; the others
            are bound by memory.
    """

    def __init__(
        self, cluster: ClusterSpec, dtype: str, efficiency: Efficiency, fill: float, codecs: Mapping[str, float]
    ) -> None:
        super().__init__(cluster, dtype, efficiency)
        self._fill, self._codecs = fill, codecs

    def forward(self, part: ModelPart, plan: Plan, seq: int) -> float:
        """FLOPs at the engine's share of the peak, of the micro-batch and of what fills no processor."""
        return super().forward(part, plan, seq) * (1 + self._fill / (plan.micro_batch * seq))

    def codec(self, work: Work) -> float:
        """At the family's own speed, if it has one."""
        speed = self._codecs.get(work.codec.family)
        if speed is None:
            return super().codec(work)
        return (work.encoded + work.decoded) * ITEMSIZE[work.dtype] / speed
