"""The nearest configuration of another framework: of what it can do, what fits and is predicted to be fastest.

Steps are at the same rates as thinwire's own: what differs is what they send, and when. A framework makes one library
call over the whole group for a unit, where thinwire has two hops; it copies what it gathers and what it reduces; and it
overlaps what its streams allow. On processors, PyTorch's FSDP and DeepSpeed wait for each call: their overlap is that
of CUDA's streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from thinwire.cost import (
    GPU_LOSS_CHUNK,
    LibraryCollectives,
    MeasuredLibrary,
    Memory,
    PricedStage,
    ProfiledRates,
    ZeroSettings,
    largest_memory,
    library_moves,
    peer_memory,
)
from thinwire.errors import UsageError
from thinwire.plan.priced import PricedPlan
from thinwire.plan.rules import UNCUT, Chain, divided, factors
from thinwire.plan.training_job import TrainingJob
from thinwire.program import Axis, Lane, Operation, UnitInfo, axis_shape
from thinwire.program.stages import Stage
from thinwire.sim.step import Simulated, simulate
from thinwire.sim.workload import Execution
from thinwire.spec import Factor, Plan
from thinwire.spec.cut import Cut
from thinwire.units import format_bytes

_OVERLAPPED: Final = ("gather", "reduce", "sync")
"""Transfers that all of these frameworks can overlap with computation on CUDA; Megatron-FSDP the spread, too."""

_LARGE: Final = 1 << 16
"""Elements of a tensor above which DeepSpeed, which gathers tensors one by one, does not keep it whole."""


def nearest(job: TrainingJob, framework: str, ours: Plan) -> PricedPlan:
    """The configuration of a framework that fits and has the shortest predicted step. It takes over the way in which
    our plan cuts the model, if it can.

    Raises:
        UsageError: No configuration of the framework fits into memory, or none divides the batch.
    """
    found = [predicted(job, framework, plan) for plan in configurations(job, framework, ours)]
    if not found:
        raise UsageError(
            f"--emit {framework}: it has no configuration for {job.cluster.gpus} GPUs and {job.tokens_per_step:,} "
            "tokens per step; change --tokens-per-step or the number of nodes"
        )
    fitting = [peer for peer in found if peer.fits]
    if not fitting:
        least = min(found, key=lambda peer: peer.memory.total)
        lacking = format_bytes(least.memory.total - job.room)
        raise UsageError(
            f"--emit {framework}: no configuration of it fits; the smallest ({least.plan.describe()}) lacks {lacking} "
            "on every GPU; use more nodes, or a framework that shards more"
        )
    return min(fitting, key=lambda peer: peer.seconds)


def configurations(job: TrainingJob, framework: str, ours: Plan) -> Iterator[Plan]:
    """What a framework can do for a job, as plans without codecs."""
    for cut in _cuts(job, framework, ours):
        mesh = divided(job.mesh, cut)
        if mesh is None:
            continue
        for sharding in _shardings(framework, mesh):
            for micro_batch, micro_batches in job.batches(cut):
                for recompute in job.recomputes:
                    yield Plan(
                        name=framework,
                        mesh=mesh,
                        **sharding,
                        tp=cut.tp,
                        pp=cut.pp,
                        pipeline_schedule=cut.schedule,
                        compute_dtype=job.compute_dtype,
                        bucket_bytes=ours.bucket_bytes,
                        micro_batch=micro_batch,
                        micro_batches=micro_batches,
                        recompute=recompute,
                    )


def predicted(job: TrainingJob, framework: str, plan: Plan) -> PricedPlan:
    """The predicted step and memory of a framework's configuration, which has the framework's name."""
    needed = _memory(job, framework, plan)
    views = (replace(job, rates=rates) for rates in job.rates.of_others.views)
    seen = (PricedPlan.of(view, plan, _step(view, framework, plan), needed, framework) for view in views)
    return max(seen, key=lambda peer: peer.seconds)


def losses(ours: PricedPlan, peer: PricedPlan) -> list[str]:
    """What a framework's configuration leaves out of the plan that was chosen, in words."""
    mine, theirs = ours.plan, peer.plan
    missing = []
    codecs = [f"{name} {codec}" for name, codec in mine.wire.codecs().items() if not codec.is_none]
    if codecs:
        missing.append(f"codecs ({', '.join(codecs)})")
    named = {"P": "params", "G": "grads", "OS": "optimizer", "secondary": "secondary"}
    differing = {label: (getattr(mine, key), getattr(theirs, key)) for label, key in named.items()}
    differing["ep"] = f"{mine.ep}", f"{theirs.ep}"
    differing["tp x pp"] = f"{mine.tp} x {mine.pp}", f"{theirs.tp} x {theirs.pp}"
    missing += [
        f"{label} {own or 'none'} (it has {its or 'none'})" for label, (own, its) in differing.items() if own != its
    ]
    return [*missing, "collectives in two hops"]


def _cuts(job: TrainingJob, framework: str, ours: Plan) -> list[Cut]:
    cut = Cut.of(ours)
    able = {"torchtitan": True, "megatron-fsdp": cut.pp == 1}.get(framework, False)
    cuts = [cut] if able and cut != UNCUT else []
    return [*cuts, UNCUT] if job.allows(UNCUT) else cuts


def _shardings(framework: str, mesh: Factor) -> Iterator[dict[str, Any]]:
    """Factors of P, G and OS that a framework can have on a mesh."""
    one, node = Factor(), Factor(local=mesh.local)
    zero1, zero2, zero3 = (one, one, mesh), (one, mesh, mesh), (mesh, mesh, mesh)
    hybrid = [(group, group, group) for group in factors(mesh) if 1 < group.ranks < mesh.ranks]
    chains: dict[str, list[Chain]] = {
        "fsdp2": [zero3, zero2],
        "hsdp": hybrid,
        "torchtitan": [zero3, zero2, *hybrid],
        "megatron-fsdp": [zero3, zero2, *hybrid, zero1],
        "deepspeed": [zero1, zero2, zero3],
    }
    for params, grads, optimizer in chains[framework]:
        yield {"params": params, "grads": grads, "optimizer": optimizer}
    if framework in ("fsdp2", "deepspeed") and 1 < node.ranks < mesh.ranks:
        yield {"params": mesh, "grads": mesh, "optimizer": mesh, "secondary": node}


def _step(job: TrainingJob, framework: str, plan: Plan) -> Simulated:
    """A step, played at the job's rates."""
    rates, workload = job.rates, job.workload(plan)
    calls = MeasuredLibrary(rates) if isinstance(rates, ProfiledRates) else LibraryCollectives(job.cluster)
    able = {} if rates.on_processors else {**dict.fromkeys(_OVERLAPPED, True), "spread": framework == "megatron-fsdp"}
    plan = plan.with_(overlap={name: able.get(name, False) for name in (*_OVERLAPPED, "spread")})
    large = [sum(tensor.numel >= _LARGE for tensor in part.tensors) for part in workload.parts]

    def pricing(plan: Plan, operation: Operation, units: Sequence[UnitInfo]) -> list[PricedStage]:
        apart = operation.lane is Lane.GATHER and framework == "deepspeed"
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


def _memory(job: TrainingJob, framework: str, plan: Plan) -> Memory:
    """Bytes on a rank; cut models are taken to need what thinwire needs for the same sharding."""
    model = job.model.with_(seq=job.seq)
    if Cut.of(plan) != UNCUT:
        return largest_memory(model, plan, seq=job.seq, overhead=job.overhead, loss_chunk=job.loss_chunk)
    numel = model.parameters
    # Replicas do not matter: a rank holds what it would in one group.
    group = plan.with_(mesh=plan.optimizer, params=plan.params, grads=plan.grads)
    zero = ZeroSettings(reduce_bucket=plan.bucket_bytes // 2)
    system = _formula(framework, plan)
    on_gloo = job.loss_chunk != GPU_LOSS_CHUNK
    needed = peer_memory(
        system, model, group, overhead=job.overhead, zero=zero, loss_chunk=job.loss_chunk, gloo=on_gloo
    )
    if plan.secondary is not None:
        needed = replace(needed, gathered=needed.gathered + 2 * numel // plan.secondary.ranks)
    if system == "fsdp2" and plan.params.ranks == 1:
        needed = replace(needed, gathered=max(needed.gathered, 2 * numel))
    return needed


def _formula(framework: str, plan: Plan) -> str:
    """Which formula of :func:`thinwire.cost.peer_memory` holds."""
    if framework == "deepspeed" or (framework == "megatron-fsdp" and plan.params.ranks == 1):
        return "zero3" if plan.params.ranks > 1 else "zero2" if plan.grads.ranks > 1 else "zero1"
    return "fsdp2"
