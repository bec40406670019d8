"""Engines that papers measured: the systems that perform a step as their authors ran them.

Each constant models one cause. Its comment states its source or what it was fitted to. All cases of an engine use the
same constants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from thinwire.cost import (
    AMSP_STATES,
    OVERHEAD,
    Efficiency,
    LibraryCollectives,
    Memory,
    ModelPart,
    PricedStage,
    States,
    library_moves,
    memory,
    parts,
)
from thinwire.cost.memory.stages import held_units, largest_stage, stages
from thinwire.program import Axis, Lane, Operation, Phase, UnitInfo, axis_shape
from thinwire.program.stages import Stage
from thinwire.program.wire import ITEMSIZE, reduction_codecs, used_codec
from thinwire.sim.axes import AxisCosts
from thinwire.sim.engine import Engine, step_with_axes
from thinwire.sim.step import Simulated
from thinwire.sim.workload import Execution, Workload
from thinwire.spec import ClusterSpec, ModelSpec, Plan
from thinwire_bench.published.engine_rates import NO_STALLS, SMALL_TENSOR, EngineRates, HostOverhead
from thinwire_bench.published.fetching import share_of_recomputation
from thinwire_bench.published.headroom import Headroom

_ALL_LOGITS = 1 << 62
"""Systems other than thinwire compute the loss of all logits at once."""

ALL = ("gather", "reduce", "sync", "spread")
"""Transfers that can overlap computation."""


@dataclass(frozen=True)
class PublishedEngine(Engine):
    """How a system performs a program.

    Attributes:
        summary: One line about the system.
        efficiency: Shares of nominal rates that it reaches.
        whole_sync: Whether every rank receives the whole sum of gradients, and keeps only its share.
        partition: How it cuts optimizer states unless a case sets this.
        states: Bytes per parameter of its states.
        update_bytes: Bytes that its update makes for each parameter of a rank's share, beside the states.
        overhead: Bytes in use without any model, including buffers whose size does not depend on it.
        keeps_gathered: Whether parameters with a secondary shard stay whole while gradients accumulate.
        bucket_bytes: Bytes of gradients that it reduces together.
        latency: Seconds of a ring's step inside a node and across nodes; ``None``: the cluster's.
        copies: Bytes that the accelerator copies for each value that is gathered, and for each gradient that is
            reduced.
        overlaps: Transfers that it can overlap with computation, by ZeRO stage (the highest sharded state; 0: none).
        in_groups: The same if all states are sharded over the same part of the ranks (MiCS).
        reuse: Parameters that may be visited between two uses of a tensor for it to stay gathered in between; ``None``:
            a block stays gathered from its recomputation to its backward.
        live: Parameters that may be gathered at the same time: what a block leaves of them, in shares of the limit, is
            gathered ahead. ``None``: no limit.
        bucket: Gradients that wait until the next block is gathered, and are reduced while it computes; ``None``: every
            reduction starts as soon as the block's gradients exist.
        cards: Share that a node with a single network card reaches of it, and the factor of the share for each doubling
            of cards; ``None``: the share is ``efficiency.nic``.
        host: Seconds that its host adds to collectives.
        call_by_tensor: Whether it gathers each large tensor of a unit with a separate call.
        codecs: Bytes per second of its codecs, by family; other codecs are bound by memory bandwidth.
        messages: Dtype of its messages; ``None``: the compute dtype.
        scatters_stages: Whether each tensor-parallel rank sends only a part of a stage's activations, which the next
            stage gathers (Narayanan et al. 2021, section 4.1).
        known: By accelerator, the smallest and the largest number of them to which the constants were fitted.
        machines: The same system as measured in another release or on other machines, by accelerator and accelerators
            per node.
    """

    summary: str
    efficiency: Efficiency
    whole_sync: bool = False
    partition: Literal["intra", "inter"] = "intra"
    states: States = AMSP_STATES
    update_bytes: int = 0
    overhead: int = OVERHEAD
    keeps_gathered: bool = False
    bucket_bytes: int = 512 << 20
    latency: tuple[float, float] | None = None
    copies: tuple[float, float] = (0.0, 0.0)
    overlaps: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    in_groups: tuple[str, ...] = ALL
    reuse: int | None = None
    live: int | None = None
    bucket: int | None = None
    cards: tuple[float, float] | None = None
    host: HostOverhead = NO_STALLS
    call_by_tensor: bool = False
    codecs: Mapping[str, float] = field(default_factory=dict)
    messages: Literal["float32"] | None = None
    scatters_stages: bool = False
    known: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    machines: Mapping[tuple[str, int], PublishedEngine] = field(default_factory=dict)

    def on(self, gpu: str, gpus_per_node: int) -> PublishedEngine:
        """The engine as measured on these machines."""
        return self.machines.get((gpu, gpus_per_node), self)

    def extrapolates(self, gpu: str, count: int) -> bool:
        """Whether ``count`` accelerators of this kind are outside the range to which the constants were fitted."""
        fewest, most = self.known.get(gpu, (0, 0))
        return not fewest <= count <= most

    def refusals(self, plan: Plan, model: ModelSpec) -> list[str]:
        """None: its rules are not thinwire's."""
        del plan, model
        return []

    def memory(self, model: ModelSpec, plan: Plan, *, room: int) -> Memory:
        """Bytes per rank that its allocator takes: all that a step ever uses at once or after another, as far as there
        is room, because blocks that are freed do not fit what comes next and stay; at least what is used at once."""
        dtype = "float16" if self.messages else plan.compute_dtype
        stage, last = largest_stage(model, plan), stages(model.layers, plan)[-1]
        held = held_units(stage, plan, last)
        needed = memory(
            stage, plan, held, seq=model.seq, states=self.states, overhead=self.overhead, loss_chunk=_ALL_LOGITS
        )
        keeps = self.keeps_gathered and plan.secondary is not None and plan.micro_batches > 1
        if keeps:
            needed = replace(needed, gathered=sum(unit.nbytes for unit in held))
        unit = max(sum(buffer.numel for buffer in unit.buffers) for unit in held)
        tensor = max(tensor.numel for part in parts(stage, plan.granularity, plan.tp) for tensor in part.tensors)
        used = replace(needed, gathered=self._gathered_at_once(plan, needed.gathered, tensor, keeps))
        share, itemsize = needed.optimizer // self.states.optimizer, ITEMSIZE[dtype]
        fixed = used.total - used.buffers - used.logits
        reducing = _reduced(plan, tensor if self.call_by_tensor else unit, dtype)
        updating = (
            needed.params + needed.secondary + (self.states.optimizer + self.update_bytes) * share + self.overhead
        )
        at_once = max(fixed + max(reducing, used.logits), updating)
        update = (self.update_bytes + itemsize) * share if self.update_bytes else 0
        ever = needed.total - needed.buffers + _reduced(plan, unit, dtype) + update
        rest = min(ever, max(at_once, room)) - (used.total - used.buffers)
        return replace(used, buffers=rest)

    def _gathered_at_once(self, plan: Plan, gathered: int, tensor: int, keeps: bool) -> int:
        """Bytes of whole parameters of which a limit lets no more be gathered ahead, and a message that is joined."""
        if self.live is None or not plan.gathers:
            return gathered
        codec = used_codec(plan, "gather")
        itemsize = ITEMSIZE[plan.compute_dtype]
        message = itemsize * tensor if codec.is_none else codec.max_wire_bytes(tensor, plan.compute_dtype)
        return message + (gathered if keeps else min(gathered, itemsize * max(self.live, tensor)))

    def overlapped(self, plan: Plan) -> Plan:
        """The plan without the overlap that this engine cannot do."""
        stage = next((3 - i for i, f in enumerate((plan.params, plan.grads, plan.optimizer)) if f.ranks > 1), 0)
        able = self.overlaps.get(stage, ALL)
        if stage == 3 and plan.params == plan.optimizer != plan.mesh:
            able = self.in_groups
        return plan.with_(overlap={name: name in able and getattr(plan.overlap, name) for name in ALL})

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
        """Play a step on a cluster with published rates; arguments as of :class:`thinwire.sim.Engine`."""
        if self.whole_sync:
            plan = _without_scatter(plan)
        rates, calls = self.prices(plan, cluster, group)
        large = [_large_tensors(part) for part in workload.parts]
        memory = cluster.memory_bandwidth / 8 * self.efficiency.memory

        again = [self._again(part) if plan.recompute else 0.0 for part in workload.parts]

        def pricing(plan: Plan, operation: Operation, units: Sequence[UnitInfo]) -> list[PricedStage]:
            gathers = operation.lane is Lane.GATHER
            count = max(1, sum(large[u] for u in operation.units)) if self.call_by_tensor and gathers else 1
            moves = library_moves(plan, operation, units, rates, calls, whole_sync=self.whole_sync, calls=count)
            stall = self._stall(plan, operation, units, sum(large[u] for u in operation.units))
            if stall:
                moves = [PricedStage(Stage.HOST, None, stall), *moves]
            if copied := self._copied(plan, operation, units):
                moves = [*moves, PricedStage(Stage.DECODE, None, copied / memory, copies=True)]
            if gathers and operation.start.phase is Phase.PRE_BACKWARD:
                more = 1 + max((again[unit] for unit in operation.units), default=0.0)
                moves = [replace(move, seconds=more * move.seconds) for move in moves]
            return moves

        room = self._room(plan, workload.parts)
        execution = Execution(pricing, room.revised, room.ahead < 1, room.bucket is not None)
        sharers = plan.tp if self.scatters_stages else 1
        costs = AxisCosts(plan, model, workload.seq, rates, calls, cluster.nodes > 1, sharers)
        return step_with_axes(costs, workload, trace=trace, execution=execution)

    def prices(self, plan: Plan, cluster: ClusterSpec, group: int | None) -> tuple[EngineRates, LibraryCollectives]:
        """What computation and codecs take, and what the library's calls take; arguments as of :meth:`step`."""
        if self.latency is not None:
            inside, nic = cluster.links.inside, cluster.links.nic
            changed = {"inside": inside.with_(latency=self.latency[0]), "nic": nic.with_(latency=self.latency[1])}
            cluster = cluster.with_(links=cluster.links.with_(**changed))
        efficiency = self.efficiency
        if self.cards is not None:
            doublings = max(0.0, math.log2(cluster.links.nic.bandwidth / _CARD))
            efficiency = replace(efficiency, nic=self.cards[0] * self.cards[1] ** doublings)
        multiplied = "bfloat16" if self.messages else plan.compute_dtype
        rates = EngineRates(cluster, multiplied, efficiency, self.codecs, group)
        return rates, LibraryCollectives(cluster, efficiency, group=group)

    def _copied(self, plan: Plan, operation: Operation, units: Sequence[UnitInfo]) -> float:
        """Bytes that the accelerator copies for an operation."""
        if operation.lane is Lane.GATHER:
            return self.copies[0] * sum(buffer.numel for unit in operation.units for buffer in units[unit].buffers)
        first = Axis.PARAMS if plan.params.ranks > 1 else Axis.SHARD if plan.optimizer.ranks > 1 else Axis.REPLICA
        if operation.lane in (Lane.REDUCE, Lane.SYNC) and operation.axis is first:
            return self.copies[1] * sum(buffer.numel for unit in operation.units for buffer in units[unit].buffers)
        return 0.0

    def _room(self, plan: Plan, parts: Sequence[ModelPart]) -> Headroom:
        """What the engine's limits leave room for beside the largest block."""
        block = max(part.numel for part in parts if part.kind == "block")
        limits_gathers = self.live is not None and plan.params.ranks > 1 and plan.overlap.gather
        ahead = max(0.0, 1 - block / self.live) if self.live is not None and limits_gathers else 1.0
        limits_reductions = self.bucket is not None and plan.overlap.reduce
        bucket = min(1.0, self.bucket / block) if self.bucket is not None and limits_reductions else None
        return Headroom(ahead, bucket, self._crossing(plan, parts))

    def _crossing(self, plan: Plan, parts: Sequence[ModelPart]) -> float:
        """Share of the backward's gathers that a second shard inside the node does not serve."""
        if plan.secondary is None or not plan.recompute or self.live is None or self.reuse is None:
            return 0.0
        sizes = [tuple(tensor.numel for tensor in part.tensors if tensor.numel >= SMALL_TENSOR) for part in parts]
        blocks = tuple(of_part for part, of_part in zip(parts, sizes, strict=True) if part.kind == "block")
        ends = tuple(size for part, of in zip(parts, sizes, strict=True) if part.kind != "block" for size in of)
        return share_of_recomputation(blocks, ends, self.live, self.reuse)

    def _again(self, part: ModelPart) -> float:
        """Share of a block that is gathered twice in the backward: for its recomputation, and for its gradients.

        A tensor stays gathered if its next use is no more than ``reuse`` parameters away. The recomputation visits the
        modules in order, and the backward in reverse.
        """
        sizes = [tensor.numel for tensor in part.tensors if tensor.numel >= SMALL_TENSOR]
        if self.reuse is None or part.kind != "block" or not sizes:
            return 0.0
        visits = [*range(len(sizes)), *reversed(range(len(sizes)))]
        freed = 0
        for visit, tensor in enumerate(visits[: len(sizes)]):
            distance = sum(sizes[other] for other in visits[visit + 1 : 2 * len(sizes) - 1 - tensor])
            freed += sizes[tensor] if distance >= self.reuse else 0
        return freed / sum(sizes)

    def _stall(self, plan: Plan, operation: Operation, units: Sequence[UnitInfo], tensors: int) -> float:
        local, nodes = axis_shape(plan, operation.axis)
        size = sum(units[unit].nbytes for unit in operation.units)
        if operation.lane is Lane.GATHER:
            return self.host.gathering(tensors, size, local * nodes)
        encodes = not reduction_codecs(plan, operation.axis)[0].is_none
        if operation.axis is Axis.PARAMS and operation.lane is Lane.REDUCE and not encodes:
            return self.host.reducing(tensors, size, local * nodes)
        return 0.0


def _without_scatter(plan: Plan) -> Plan:
    """The plan with one codec for all gradients: an all-reduce brings them to the owners of optimizer states, too.

    DeepSpeed's users see that all-reduce under ZeRO-1 (its discussion 5560), although its key is ``reduce_scatter``.
    """
    return plan.model_copy(update={"wire": plan.wire.model_copy(update={"scatter": None})})


def _reduced(plan: Plan, numel: int, dtype: str) -> int:
    """Bytes of gradients that do not stay on the rank, as autograd makes them and as they travel."""
    if plan.grads.ranks == 1:
        return 0
    codec = reduction_codecs(plan, Axis.PARAMS)[0]
    made = ITEMSIZE[dtype] * numel
    return made + (made if codec.is_none else 2 * codec.max_wire_bytes(numel, dtype))


def _large_tensors(part: ModelPart) -> int:
    return sum(tensor.numel >= SMALL_TENSOR for tensor in part.tensors)


_RING = (6e-6, 20e-6)
"""Seconds of a ring's step inside a node and across nodes: InternEvo's, fitted by hand at 512 GPUs. Others use it."""

_AMPERE = 0.84
"""Share of an A100's or A800's peak that large matrix products reach. Fitted to AMSP's and InternEvo's tables."""

_VOLTA = 0.84
"""Share of a V100's peak. Fitted to DeepSpeed's tables."""

_CARD = 100e9
"""Bit/s of one network card of these machines."""

_CARDS = (0.94, 0.845)
"""Share that DGX-2, p3dn and p4d reach of a single network card, and its factor for each doubling of cards. Fitted to
DeepSpeed's tables."""

_EAGER = 1.75
"""Times that kernels which are not fused read and write what fused ones would. Fitted to DeepSpeed's tables."""

_TODAY = Efficiency(compute=_AMPERE, inside=0.70, nic=0.875, beside=1.15, step=0.05, passes=_EAGER, update_bytes=52)
"""DeepSpeed's efficiency on A800: that of AMSP's engine on the same machines, with a fused optimizer, before which
gradients are cast, unscaled and measured."""

_COPIES = (2.0, 12.0)
"""Bytes of DeepSpeed's copies in its stage 3, from its code: parameters that are gathered together, about half of them,
are joined from ranks' parts (read and written); a gradient is copied into the bucket, divided by the number of ranks,
and cut into padded parts."""

_DECISION = 1.1e-3
"""Seconds per gathered module since pull request 1453; before, it was twice as long. Fitted to the EFA table."""

_FLUSHED = HostOverhead(partition=24e-6, flush=0.45e-9, chance=6.6e-4)
"""Fitted jointly to issue 1069 (16 to 128 GPUs), pull request 1453 (64), and AMSP's ZeRO-3 and hpZ (1024)."""

_FOREACH = 12
"""Bytes of InternEvo's update, from its code and torch's: an fp32 copy of the gradient, and AdamW's root and
denominator, which torch's fused kernel would not store."""

_BUFFERS = 10_000_000_000
"""Bytes that InternEvo's ZeRO-1 uses in addition to states and activations: flat gradients, parameters in flight, and
libraries. Fitted to its table of memory; AMSP runs on the same code."""

_BUCKET = 1_000_000_000
"""Bytes of DeepSpeed's reduce_bucket_size at 16 bits; gradients fill one such buffer while another is reduced."""

_DEEPSPEED = PublishedEngine(
    "DeepSpeed's ZeRO: modules are gathered one by one, everything else waits (AMSP's baselines, late 2023)",
    _TODAY,
    whole_sync=True,
    # Stage 1 reduces after the backward. MiCS waits for everything; stage 3 for what its limits leave no room for.
    overlaps={1: (), 2: ("reduce", "sync"), 3: ("gather", "reduce", "sync")},
    in_groups=(),
    # An assumption: of all that were tried, only this one makes AMSP's 30B too large for 32 GPUs but not for more.
    keeps_gathered=True,
    reuse=1_000_000_000,  # stage3_max_reuse_distance
    live=1_000_000_000,  # stage3_max_live_parameters
    bucket=500_000_000,  # reduce_bucket_size
    host=_FLUSHED,
    call_by_tensor=True,
    latency=_RING,
    copies=_COPIES,
    bucket_bytes=_BUCKET,
    overhead=OVERHEAD + 2 * _BUCKET,
    known={"a800-80g": (8, 1024)},
)

_DEEPSPEED_2021 = replace(
    _DEEPSPEED,
    summary="DeepSpeed of 2021: gathers wait as well, gradients are reduced to their owners",
    overlaps={1: (), 2: ("reduce", "sync"), 3: ()},
    whole_sync=False,
    host=replace(_FLUSHED, decision=2 * _DECISION),
)

_P4D = replace(_TODAY, compute=0.675, attention=None)
"""On p4d, with the software of 2021. ``compute`` is fitted to the EFA table."""

_VOLTAS = replace(_TODAY, compute=_VOLTA, attention=None)
"""On machines with V100s."""

_MVAPICH = PublishedEngine(
    "GPT-NeoX on MVAPICH2-GDR with compression on the fly (arXiv 2409.02423): fp32 messages, nothing overlapped",
    Efficiency(compute=0.32, inside=0.76, nic=0.77, beside=1.0, step=0.1),
    whole_sync=True,
    overlaps=dict.fromkeys(range(4), ()),
    codecs={"mpc": 76e9, "zfp": 106e9},
    messages="float32",
    scatters_stages=True,
    known={"v100-16g": (192, 192)},
)


def _evo(step: float) -> Efficiency:
    """InternEvo's efficiency, on which AMSP's engine is built; all but the end of the step is fitted to both tables.

    The optimizer is not fused: it casts, unscales, measures and clips gradients, and updates in about ten kernels.
    """
    return Efficiency(compute=_AMPERE, inside=0.70, nic=0.875, beside=1.15, step=step, update_bytes=150)


_INTERNEVO = PublishedEngine(
    "InternEvo's hybrid ZeRO (train_performance.md): as AMSP's engine, with a costlier end of a step",
    _evo(0.41),
    whole_sync=True,
    partition="inter",
    update_bytes=_FOREACH,
    overhead=_BUFFERS,
    latency=_RING,
    known={"a100-80g": (8, 512)},
)

ENGINES: dict[str, PublishedEngine] = {
    "amsp": PublishedEngine(
        "AMSP on InternLM's engine (arXiv 2311.00257): whole tensors dealt, all-reduce, grouped broadcasts",
        _evo(0.067),
        whole_sync=True,
        partition="inter",
        update_bytes=_FOREACH,
        overhead=_BUFFERS,
        # Chosen by comparing structures: with exposed gathers, AMSP's plans gain over MiCS's what its text states.
        in_groups=("reduce", "sync", "spread"),
        known={"a800-80g": (64, 64)},
    ),
    "internevo": _INTERNEVO,
    "internevo-fsdp": replace(
        _INTERNEVO,
        summary="InternEvo over PyTorch's FSDP, whose buffers are small",
        partition="intra",
        overhead=OVERHEAD,
        known={},
    ),
    "deepspeed": replace(
        _DEEPSPEED,
        machines={
            ("a100-40g", 8): replace(_DEEPSPEED_2021, efficiency=_P4D, cards=_CARDS, known={"a100-40g": (64, 64)}),
            ("v100-32g", 8): replace(_DEEPSPEED_2021, efficiency=_VOLTAS, cards=_CARDS, known={"v100-32g": (16, 128)}),
            # ZeRO++'s authors on their own DGX-2 machines: no flushes, and no slow partitioning of gradients.
            ("v100-32g", 16): replace(
                _DEEPSPEED,
                efficiency=_VOLTAS,
                cards=_CARDS,
                overhead=OVERHEAD,  # their tutorial sets reduce_bucket_size to 10^7
                host=NO_STALLS,
                known={"v100-32g": (384, 384)},
            ),
        },
    ),
    "deepspeed-efa": replace(
        _DEEPSPEED,
        summary="DeepSpeed with Amazon's work for EFA (pull request 1453): all of stage 3 beside computation",
        efficiency=_P4D,
        cards=_CARDS,
        overlaps={1: (), 2: ("reduce", "sync"), 3: ("gather", "reduce", "sync")},
        in_groups=("gather", "reduce", "sync"),
        reuse=None,
        live=None,
        bucket=None,
        whole_sync=False,
        host=HostOverhead(decision=_DECISION),
        known={"a100-40g": (64, 256)},
    ),
    "megatron": PublishedEngine(
        "Megatron-LM of 2023: states of the optimizer over all ranks, nothing overlapped; rates are DeepSpeed's",
        _TODAY,
        overlaps=dict.fromkeys(range(4), ()),
        latency=_RING,
        scatters_stages=True,
    ),
    "mvapich": _MVAPICH,
    "nccl": replace(
        _MVAPICH,
        summary="the same on NCCL, whose transfers are faster",
        efficiency=replace(_MVAPICH.efficiency, inside=0.93, nic=0.93),
    ),
}
"""Engines by the name that ``engine`` takes."""
