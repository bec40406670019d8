"""Engines, the systems that perform a step: thinwire itself, and those that installed packages add.

``thinwire-bench`` adds the systems that papers measured, under the entry point ``thinwire.engines``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from typing import Literal

from thinwire.cost import OVERHEAD, LibraryCollectives, Memory, NominalRates, largest_memory
from thinwire.sim.axes import AxisCosts, pass_seconds
from thinwire.sim.step import Simulated, simulate
from thinwire.sim.workload import Execution, Workload
from thinwire.spec import ClusterSpec, ModelSpec, Plan
from thinwire.spec.cut import Cut, cut_problems, stage_problems

GROUP = "thinwire.engines"
"""Entry points of mappings from names to engines."""


class Engine:
    """How a system performs a program; what is not overridden is as thinwire does it: collectives in two hops,
    everything overlapped, nominal rates.

    Attributes:
        partition: How it cuts optimizer states unless a case sets this.
        bucket_bytes: Bytes of gradients that it reduces together.
        messages: Dtype of its messages; ``None``: the compute dtype.
    """

    partition: Literal["intra", "inter"] = "intra"
    bucket_bytes: int = 4 << 20
    messages: Literal["float32"] | None = None

    def on(self, gpu: str, gpus_per_node: int) -> Engine:
        """The engine as measured on these machines."""
        del gpu, gpus_per_node
        return self

    def extrapolates(self, gpu: str, count: int) -> bool:
        """Whether ``count`` accelerators of this kind are outside the range to which its constants were fitted; yes
        where nothing was fitted."""
        del gpu, count
        return True

    def overlapped(self, plan: Plan) -> Plan:
        """The plan without the overlap that this engine cannot do."""
        return plan

    def refusals(self, plan: Plan, model: ModelSpec) -> list[str]:
        """One sentence for each reason for which it does not train a model under a plan."""
        return stage_problems(plan) + cut_problems(model, model.seq, Cut.of(plan))

    def memory(self, model: ModelSpec, plan: Plan, *, room: int) -> Memory:
        """Bytes on the rank that needs the most, with the model's sequences; ``room`` is the accelerator's, for systems
        whose allocators keep what they could return."""
        del room
        return largest_memory(model, plan, seq=model.seq, overhead=OVERHEAD)

    def step(
        self,
        plan: Plan,
        workload: Workload,
        cluster: ClusterSpec,
        model: ModelSpec,
        *,
        group: int | None,
        trace: bool = False,
    ) -> Simulated:
        """Play a step on a cluster with published rates; ``group``: of a cluster of unlike nodes, the number of the
        group whose nodes see the step. Tensor-parallel sums and messages between stages are the library's calls."""
        rates = NominalRates(cluster, plan.compute_dtype, group=group)
        calls = LibraryCollectives(cluster, group=group)
        costs = AxisCosts(plan, model, workload.seq, rates, calls, cluster.nodes > 1)
        step = step_with_axes(costs, workload, trace=trace)
        return replace(step, seconds=step.seconds + costs.awaited)  # as Torch's schedules wait for every message


def step_with_axes(
    costs: AxisCosts, workload: Workload, *, trace: bool = False, execution: Execution | None = None
) -> Simulated:
    """Play a step with what sharing the model takes; messages between full stages are taken to be hidden."""
    plan, rates = costs.plan, costs.rates
    workload = replace(workload, exchanges=costs.exchanges(workload.parts))
    step = simulate(plan, workload, rates, micro_batches=plan.micro_batches, trace=trace, execution=execution)
    return replace(step, seconds=step.seconds + costs.idle(*pass_seconds(plan, workload, rates)))


@cache
def engines() -> Mapping[str, Engine]:
    """Every engine by the name that ``engine`` takes: thinwire's, and those that packages register."""
    found: dict[str, Engine] = {"thinwire": Engine()}
    for point in entry_points(group=GROUP):
        found |= point.load()
    return found
