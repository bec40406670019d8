"""Steps of other frameworks, at the same rates as thinwire's own: what differs is what they send, and when.

Each makes one library call over the whole group for a unit, where thinwire has two hops; it copies what it gathers and
what it reduces; and it overlaps what its streams allow. On processors, PyTorch's FSDP and DeepSpeed wait for each call:
their overlap is that of CUDA's streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from thinwire.cost import MeasuredLibrary, PricedStage, ProfiledRates, Rates, flat_moves
from thinwire.cost.flat import KINDS, GroupCalls
from thinwire.program import Axis, Kind, Lane, Operation, Scope, UnitInfo, axis_shape
from thinwire.program.stages import Stage
from thinwire.sim.script import Workload
from thinwire.sim.step import Simulated, simulate
from thinwire.spec import Factor, Plan

__all__ = ["PEER_FRAMEWORKS", "MeasuredCalls", "PeerFramework", "peer_step"]


@dataclass(frozen=True)
class PeerFramework:
    """How a framework performs a step on CUDA.

    Attributes:
        summary: One line about it.
        overlaps: Transfers that it can overlap with computation.
        by_tensor: Whether it gathers every large tensor by a call of its own.
    """

    summary: str
    overlaps: tuple[str, ...]
    by_tensor: bool = False


PEER_FRAMEWORKS: Final[Mapping[str, PeerFramework]] = {
    "fsdp2": PeerFramework("PyTorch's fully_shard", ("gather", "reduce", "sync")),
    "hsdp": PeerFramework("PyTorch's fully_shard over a mesh of two dimensions", ("gather", "reduce", "sync")),
    "megatron-fsdp": PeerFramework("Megatron-Core's FSDP", ("gather", "reduce", "sync", "spread")),
    "deepspeed": PeerFramework("DeepSpeed's ZeRO", ("gather", "reduce", "sync"), by_tensor=True),
    "torchtitan": PeerFramework("torchtitan, which uses PyTorch's fully_shard", ("gather", "reduce", "sync")),
}
"""Frameworks by the name that ``--emit`` takes."""

_LARGE: Final = 1 << 16
"""Elements of a tensor above which a framework that gathers tensors one by one does not keep it whole."""


class MeasuredCalls:
    """Library calls over a whole group at the rates of a profile.

    A profile that was made with ``--library`` has timed them. For others, calls follow from thinwire's own: a ring over
    all ranks enters and leaves each node once. What crosses a node's link in it takes as long as the same bytes of all
    ranks of the node together; the other rounds add the latency of a small message inside the node. gloo reduces and
    scatters by an all-reduce, of which each rank keeps its share, and adds on the processor.

    Args:
        rates: Rates of the profiled cluster.
    """

    def __init__(self, rates: ProfiledRates) -> None:
        self._rates = rates
        self._library = MeasuredLibrary(rates)
        self._whole_sums = rates.profile.backend == "gloo"

    def spine_load(self, mesh: Factor, stride: int) -> float:
        """0: a profile does not measure the spine."""
        del mesh, stride
        return 0.0

    def seconds(self, kind: Literal["AG", "RS", "AR", "BC"], size: float, mesh: Factor, stride: int = 1) -> float:
        """Seconds of one call; arguments as of :class:`thinwire.cost.FlatCollectives`."""
        del stride
        ranks = mesh.ranks
        if ranks == 1 or not size:
            return 0.0
        measured = self._library.seconds(KINDS[kind], size, mesh)
        if measured is not None:
            return measured
        if self._whole_sums and kind in ("RS", "AR"):
            return 2 * self._ring(Kind.ALL_GATHER, size, mesh) + self._rates.touch(size / 2)
        if kind == "AR":
            return self._ring(Kind.REDUCE_SCATTER, size, mesh) + self._ring(Kind.ALL_GATHER, size, mesh)
        return self._ring(KINDS[kind], size, mesh)

    def _ring(self, operator: Kind, size: float, mesh: Factor) -> float:
        ranks, sent = mesh.ranks, size * (mesh.ranks - 1) / mesh.ranks
        if mesh.nodes == 1:
            return self._rates.hop(operator, Scope.INSIDE, ranks, round(sent), encoded=False)
        # R / local groups cross each node's cards at the same time; the profile's rows have all R ranks send.
        across = self._rates.hop(operator, Scope.ACROSS, mesh.nodes, round(sent / mesh.local), encoded=False)
        if mesh.local == 1:
            return across
        # The ranks of a node pass everything on to each other at the same time.
        inside = self._rates.hop(operator, Scope.INSIDE, mesh.local, round(sent), encoded=False)
        return max(across, inside)

    def broadcasts(self, size: float, owners: int, mesh: Factor, stride: int = 1) -> float:
        """Seconds of grouped broadcasts, as long as an all-gather of the same vector."""
        del owners
        return self.seconds("AG", size, mesh, stride)


def peer_step(framework: str, plan: Plan, workload: Workload, rates: Rates, calls: GroupCalls) -> Simulated:
    """Play a step of another framework.

    Args:
        framework: A key of ``PEER_FRAMEWORKS``.
        plan: What it shards, as a plan.
        workload: A rank's part of the model.
        rates: Seconds of computation, copies and transfers.
        calls: Seconds of library calls.
    """
    peer = PEER_FRAMEWORKS[framework]
    on_processors = isinstance(rates, ProfiledRates) and rates.profile.backend == "gloo"
    able = () if on_processors else peer.overlaps
    names = ("gather", "reduce", "sync", "spread")
    plan = plan.with_(overlap={name: name in able for name in names})
    large = [sum(tensor.numel >= _LARGE for tensor in part.tensors) for part in workload.parts]

    def pricing(plan: Plan, operation: Operation, units: Sequence[UnitInfo]) -> list[PricedStage]:
        gathers = operation.lane is Lane.GATHER
        calls_each = max(1, sum(large[unit] for unit in operation.units)) if peer.by_tensor and gathers else 1
        moves = flat_moves(plan, operation, units, rates, calls, whole_sync=False, calls=calls_each)
        copied = rates.touch(_copied(plan, operation, units)) if moves else 0.0
        if copied:
            moves = [*moves, PricedStage(Stage.DECODE, None, copied, copies=True)]
        return moves

    return simulate(plan, workload, rates, micro_batches=plan.micro_batches, pricing=pricing)


def _copied(plan: Plan, operation: Operation, units: Sequence[UnitInfo]) -> float:
    """Values that are copied for an operation.

    A gather casts the shard, copies it into its place in the buffer, and copies every parameter out of the buffer. A
    reduction copies gradients into its buffer, and casts the shard of their sums.
    """
    whole = float(sum(buffer.numel for unit in operation.units for buffer in units[unit].buffers))
    local, nodes = axis_shape(plan, operation.axis)
    shard = whole / (local * nodes)
    if operation.lane in (Lane.GATHER, Lane.SPREAD):
        return whole + 2 * shard
    reduces = operation.lane in (Lane.REDUCE, Lane.SYNC) and operation.axis is not Axis.REPLICA
    return whole + shard if reduces else 0.0
