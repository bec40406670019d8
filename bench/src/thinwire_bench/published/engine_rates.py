"""Rates of published engines, whose codecs have speeds of their own."""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.cost import Efficiency, NominalRates, Work
from thinwire.program.wire import ITEMSIZE
from thinwire.spec import ClusterSpec

__all__ = ["EngineRates"]


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
