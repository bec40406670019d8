"""Rates of a cluster of unlike nodes, as its different ranks see them.

Ranks of a synchronous step wait for each other. Each computes, and sends inside its node, at its own rate; a collective
goes at the slowest member and link of its group. The simulator plays the step as a rank of each group of nodes sees it,
and the slowest of them is the step.
"""

from __future__ import annotations

from thinwire.cost.rates import Efficiency, NominalRates, Rates
from thinwire.spec import ClusterSpec, Fabric, seen_by

__all__ = ["MixedRates", "nominal_rates", "views_of"]


class MixedRates(NominalRates):
    """Rates of a rank of the group of nodes that computes slowest, and the ``views`` of all groups.

    Whatever is estimated with them is a bound: no step is shorter than it is for one of its ranks.

    Args:
        cluster: A cluster with groups of nodes.
        dtype: Compute dtype.
        efficiency: Shares of the nominal rates that software reaches.

    Raises:
        SpecError: A group has no peak for the dtype, or a file with times of kernels cannot be read.
    """

    def __init__(self, cluster: ClusterSpec, dtype: str = "bfloat16", efficiency: Efficiency | None = None) -> None:
        slowest = min(range(len(cluster.groups)), key=lambda number: _peak(cluster, number))
        super().__init__(seen_by(cluster, slowest), dtype, efficiency, Fabric(cluster, slowest))
        self.views: tuple[NominalRates, ...] = tuple(
            NominalRates(seen_by(cluster, number), dtype, efficiency, Fabric(cluster, number))
            for number in range(len(cluster.groups))
        )

    def on(self, cluster: ClusterSpec) -> NominalRates:
        """Rates of the same kind for another cluster."""
        return nominal_rates(cluster, self._dtype, self._efficiency)


def nominal_rates(cluster: ClusterSpec, dtype: str = "bfloat16", efficiency: Efficiency | None = None) -> NominalRates:
    """Rates from published figures, for equal or for unlike nodes; arguments as of :class:`MixedRates`."""
    return (MixedRates if cluster.groups else NominalRates)(cluster, dtype, efficiency)


def views_of(rates: Rates) -> tuple[Rates, ...]:
    """The rates as ranks of every group of nodes see them; one if all ranks see the same."""
    return rates.views if isinstance(rates, MixedRates) else (rates,)


def _peak(cluster: ClusterSpec, number: int) -> float:
    peaks = cluster.groups[number].peak_flops or cluster.peak_flops
    return max(peaks.get(dtype, 0.0) for dtype in cluster.peak_flops)
