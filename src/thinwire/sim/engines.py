"""Who performs a step: thinwire, and the published systems that papers measured.

Each constant stands for a cause, says where it was taken from or fitted to, and is used by every case of its engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from thinwire.cost import AMSP_STATES, Efficiency, FlatCollectives, Move, NominalRates, Rates, States, flat_moves
from thinwire.program import Operation, UnitInfo
from thinwire.program.wire import ITEMSIZE
from thinwire.sim.axes import TensorParallelRates, idle_seconds
from thinwire.sim.step import Simulated, Workload, simulate
from thinwire.spec import ClusterSpec, Factor, Plan

__all__ = ["ENGINES", "Engine"]


@dataclass(frozen=True)
class Engine:
    """How a system performs a program.

    Attributes:
        summary: what it is.
        efficiency: shares of nominal rates that it reaches.
        flat: whether a collective is one call over its group; else thinwire's two hops.
        whole_sync: whether gradients are synchronised whole, of which each rank keeps its share.
        partition: how it cuts optimizer states, where a case does not say.
        states: bytes per parameter that it keeps; ``None``: as thinwire.
        bucket_bytes: of gradients that it reduces together.
        latency: seconds of a ring's step inside a node and across nodes; ``None``: the cluster's.
        known: by accelerator, the fewest and most of them in what the constants were fitted to.
    """

    summary: str
    efficiency: Efficiency
    flat: bool = True
    whole_sync: bool = False
    partition: Literal["intra", "inter"] = "intra"
    states: States | None = None
    bucket_bytes: int = 512 << 20
    latency: tuple[float, float] | None = None
    known: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def extrapolates(self, gpu: str, count: int) -> bool:
        """Whether so many accelerators of a kind are beyond what the constants were fitted to."""
        fewest, most = self.known.get(gpu, (0, 0))
        return not fewest <= count <= most

    def step(
        self,
        plan: Plan,
        workload: Workload,
        cluster: ClusterSpec,
        *,
        micro_batches: int,
        hidden: int,
        trace: bool = False,
    ) -> Simulated:
        """Play a step on a cluster of published figures.

        Args:
            plan: the plan.
            workload: a rank's part of the model.
            cluster: links and peaks.
            micro_batches: of a step.
            hidden: width of the residual stream.
            trace: whether to keep the spans.
        """
        if self.latency is not None:
            inside, nic = cluster.links.inside, cluster.links.nic
            changed = {"inside": inside.with_(latency=self.latency[0]), "nic": nic.with_(latency=self.latency[1])}
            cluster = cluster.with_(links=cluster.links.with_(**changed))
        rates: Rates = NominalRates(cluster, plan.compute_dtype, self.efficiency)
        flat = FlatCollectives(cluster, self.efficiency)
        if plan.tp > 1:
            rates = TensorParallelRates(rates, flat, plan.tp, hidden, ITEMSIZE[plan.compute_dtype])

        def pricing(plan: Plan, operation: Operation, units: Sequence[UnitInfo]) -> list[Move]:
            return flat_moves(plan, operation, units, rates, flat, whole_sync=self.whole_sync)

        played = simulate(
            plan, workload, rates, micro_batches=micro_batches, trace=trace, pricing=pricing if self.flat else None
        )
        if plan.pp == 1:
            return played
        size = plan.micro_batch * workload.seq * hidden * ITEMSIZE[plan.compute_dtype]
        next_stage = Factor(local=1, nodes=2) if cluster.nodes > 1 else Factor(local=2)
        idle = idle_seconds(plan, workload, rates, flat.seconds("BC", size, next_stage))
        return replace(played, seconds=played.seconds + idle)


ENGINES: dict[str, Engine] = {
    "thinwire": Engine(
        "this library: collectives in two hops, everything overlapped", Efficiency(), flat=False, bucket_bytes=4 << 20
    ),
    "amsp": Engine(
        "AMSP on InternLM's engine (arXiv 2311.00257): whole tensors dealt, all-reduce, grouped broadcasts",
        Efficiency(compute=0.69, inside=0.75, nic=0.98, beside=1.0, step=0.19),
        whole_sync=True,
        partition="inter",
        states=AMSP_STATES,
        known={"a800-80g": (64, 64)},
    ),
    "internevo": Engine(
        "InternEvo's hybrid ZeRO (train_performance.md): as AMSP's engine, with a costlier end of a step",
        Efficiency(compute=0.72, inside=0.45, nic=0.83, step=0.6),
        whole_sync=True,
        partition="inter",
        states=AMSP_STATES,
        latency=(6e-6, 20e-6),
        known={"a100-80g": (8, 512)},
    ),
}
"""By the name that ``--engine`` takes."""
