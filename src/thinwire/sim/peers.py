"""Steps of other frameworks, at the same rates as thinwire's own: what differs is what they send, and when.

Each makes one library call over the whole group for a unit, where thinwire has two hops; it copies what it gathers and
what it reduces; and it overlaps what its streams allow. On processors, PyTorch's FSDP and DeepSpeed wait for each call:
their overlap is that of CUDA's streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from thinwire.cost import CollectiveTimes, PricedStage, Rates, library_moves
from thinwire.program import Axis, Lane, Operation, UnitInfo, axis_shape
from thinwire.program.stages import Stage
from thinwire.sim.step import Simulated, simulate
from thinwire.sim.workload import Execution, Workload
from thinwire.spec import Plan

_OVERLAPPED: Final = ("gather", "reduce", "sync")
"""Transfers that all of these frameworks can overlap with computation on CUDA."""

_OVERLAPS_SPREAD: Final = ("megatron-fsdp",)
"""Frameworks that overlap the spread of updated parameters, too."""

_GATHERS_TENSORS: Final = ("deepspeed",)
"""Frameworks that gather every large tensor by a call of its own."""

_LARGE: Final = 1 << 16
"""Elements of a tensor above which a framework that gathers tensors one by one does not keep it whole."""


def peer_step(framework: str, plan: Plan, workload: Workload, rates: Rates, calls: CollectiveTimes) -> Simulated:
    """Play a step of another framework, by its name as ``--emit`` takes it."""
    able = (*_OVERLAPPED, "spread") if framework in _OVERLAPS_SPREAD else _OVERLAPPED
    names = () if rates.on_processors else able
    plan = plan.with_(overlap={name: name in names for name in (*_OVERLAPPED, "spread")})
    large = [sum(tensor.numel >= _LARGE for tensor in part.tensors) for part in workload.parts]

    def pricing(plan: Plan, operation: Operation, units: Sequence[UnitInfo]) -> list[PricedStage]:
        apart = operation.lane is Lane.GATHER and framework in _GATHERS_TENSORS
        tensors = sum(large[unit] for unit in operation.units) if apart else 1
        moves = library_moves(plan, operation, units, rates, calls, whole_sync=False, calls=max(1, tensors))
        copied = rates.touch(_copied(plan, operation, units)) if moves else 0.0
        if copied:
            moves = [*moves, PricedStage(Stage.DECODE, None, copied, copies=True)]
        return moves

    return simulate(plan, workload, rates, micro_batches=plan.micro_batches, execution=Execution(pricing))


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
