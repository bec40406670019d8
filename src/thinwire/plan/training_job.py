"""The training job that the planner is asked about, and the choices that it leaves open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self

from thinwire.cost import (
    GPU_LOSS_CHUNK,
    HOST_LOSS_CHUNK,
    OVERHEAD,
    HopCollectives,
    ModelPart,
    NominalRates,
    ProfiledRates,
    Rates,
    parts,
    units,
)
from thinwire.cost.memory.stages import largest_stage
from thinwire.errors import SpecError
from thinwire.plan.rules import UNCUT, cuts, divided, powers_of_two
from thinwire.program import UnitInfo
from thinwire.sim import Workload
from thinwire.sim.axes import AxisCosts
from thinwire.spec import ClusterSpec, Factor, ModelSpec, Plan
from thinwire.spec.cut import Cut, cut_problems, keeps_busy
from thinwire.spec.plan import Dtype
from thinwire.spec.plan_parts.residence import Residence
from thinwire.spec.profile import Profile

CodecLevel = Literal["none", "lossless", "standard", "aggressive"]


def _level(
    params: tuple[str, ...] = (),
    intra: tuple[str, ...] = (),
    inter: tuple[str, ...] = (),
    activations: tuple[str, ...] = (),
) -> dict[str, tuple[str, ...]]:
    """Codecs of parameters, of gradients inside a node and across, and of activations, each beside none."""
    of_fields = {"gather": params, "reduce_intra": intra, "reduce_inter": inter, "spread": params}
    of_fields |= {"tp": activations, "pp": activations}
    return {field: ("none", *codecs) for field, codecs in of_fields.items()}


_INT8, _INT6 = ("int8:256",), ("int8:256", "int6:256")

CODEC_LEVELS: dict[CodecLevel, dict[str, tuple[str, ...]]] = {
    "none": _level(),
    "lossless": _level(("exp3",), ("mpc",), ("mpc",)),
    "standard": _level(_INT8, _INT8, ("int8:256", "int4:256"), _INT8),
    "aggressive": _level(_INT6, ("int8:256", "int4:256"), ("int8:256", "int4:256", "int3:256"), _INT6),
}
"""Codecs that the search may choose from, by level and by field of ``wire``. Each tuple starts with the plainest."""


LARGEST_MICRO_BATCH = 32
"""Most sequences of a micro-batch that the search tries."""


@dataclass(frozen=True)
class TrainingJob:
    """A training job on a cluster.

    Attributes:
        model: Dimensions of the model.
        cluster: The machine that trains it.
        tokens_per_step: Tokens of one optimizer step, summed over all ranks.
        seq: Tokens per sequence.
        micro_batch: Sequences per rank and micro-batch; ``None`` lets the search choose.
        largest_micro_batch: Most sequences that the search may put into a micro-batch; ``None`` sets no limit.
        recompute: Whether blocks are recomputed in the backward; ``None`` lets the search choose.
        residences: What lives on the host, of which the search may choose.
        codecs: The level of compression up to which the search may choose codecs.
        compute_dtype: Dtype of the forward and the backward.
        clip: Whether ranks exchange the norm of the gradient: to clip it, or, as ``thinwire train`` always does, to
            record it.
        rates: Seconds of computation, codecs and transfers.
        overhead: Bytes in use on a rank before it holds any model.
        margin: Share of its predicted memory that a rank may need in addition.
        tp: Numbers of tensor-parallel ranks to choose from; ``None``: powers of two up to a node's ranks.
        pp: Numbers of pipeline stages to choose from; ``None``: powers of two up to the model's blocks.

    Raises:
        SpecError: The runtime could not train the model with any of the cuts and batches that the job allows.
    """

    model: ModelSpec
    cluster: ClusterSpec
    tokens_per_step: int
    seq: int
    micro_batch: int | None = None
    recompute: bool | None = None
    residences: tuple[Residence, ...] = (Residence(),)
    codecs: CodecLevel = "standard"
    compute_dtype: Dtype = "bfloat16"
    clip: bool = True
    rates: Rates = field(kw_only=True)
    overhead: int = OVERHEAD
    margin: float = 0.0
    largest_micro_batch: int | None = None
    tp: tuple[int, ...] | None = (1,)
    pp: tuple[int, ...] | None = (1,)

    def __post_init__(self) -> None:
        if not self.cuts:
            raise SpecError("plan", [_why_no_cut(self)])

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        seq: int,
        cluster: ClusterSpec | None,
        profile: Profile | None,
        plan: Plan | None = None,
        **choices: Any,
    ) -> Self:
        """A job with the rates and the memory that are known of a cluster.

        Args:
            model: Dimensions of the model.
            seq: Tokens per sequence.
            cluster: The machine; ``None``: the one that was profiled.
            profile: Its measurements; ``None``: published figures.
            plan: A plan with the job's ranks, dtype and batch: micro-batch times micro-batches is the number of
                sequences that a rank trains in a step. ``None``: ``choices`` say what of these is known.
            **choices: Other fields, which take precedence.

        Raises:
            SpecError: The runtime could not train the model in any way that the job allows.
        """
        if cluster is None:
            assert profile is not None, "a cluster is named or profiled"
            cluster = profiled_cluster(profile)
        fields: dict[str, Any] = {"compute_dtype": cluster.compute_dtype}
        if plan is not None:
            tokens = plan.data_ranks * plan.micro_batch * plan.micro_batches * seq
            fields = {
                "compute_dtype": plan.compute_dtype,
                "tokens_per_step": tokens,
                "tp": (plan.tp,),
                "pp": (plan.pp,),
            }
        fields |= choices
        dtype = fields["compute_dtype"]
        rates = NominalRates(cluster, dtype) if profile is None else ProfiledRates(profile, model, dtype)
        known: dict[str, Any] = {"rates": rates}
        if profile is not None:
            known |= {"overhead": profile.base_memory, "margin": profile.memory_margin}
        return cls(model=model, cluster=cluster, seq=seq, **known | fields)

    @property
    def room(self) -> int:
        """Bytes that a plan may need on a rank by prediction: the cluster's memory less the margin."""
        return int(self.cluster.memory / (1 + self.margin))

    @property
    def tie(self) -> float:
        """Relative difference below which two predicted times tie; a tie goes to the plan with fewer knobs.

        Published rates have no noise, so 1 % is enough. A profile is measured and noisy, so it takes 4 %.
        """
        return self.rates.noise

    @property
    def loss_chunk(self) -> int:
        """Most logits of which the loss has fp32 copies at once; ranks of a profile over gloo compute on processors."""
        return HOST_LOSS_CHUNK if self.rates.on_processors else GPU_LOSS_CHUNK

    # -- how the ranks may share the model ---------------------------------------------------------------------------

    @property
    def mesh(self) -> Factor:
        """All ranks."""
        return Factor(local=self.cluster.gpus_per_node, nodes=self.cluster.nodes)

    def mesh_of(self, cut: Cut) -> Factor:
        """The data-parallel ranks that a cut leaves.

        Raises:
            SpecError: The mesh cannot be divided this way.
        """
        return self.mesh.data_parallel(cut.tp, cut.pp)

    def allows(self, cut: Cut) -> bool:
        """Whether the runtime can cut the model and the batch this way."""
        mesh = divided(self.mesh, cut)
        return mesh is not None and not cut_problems(self.model, self.seq, cut) and bool(self.batches(cut))

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """Cuts of the model that the runtime supports; plain data parallelism comes first."""
        return tuple(cut for cut in _candidate_cuts(self, self.tp, self.pp) if self.allows(cut))

    @property
    def refusals(self) -> list[str]:
        """One sentence for each rule that keeps the runtime from a cut that was asked for."""
        asked = [cut for cut in _candidate_cuts(self, self.tp, self.pp) if cut.schedule == UNCUT.schedule]
        return list(dict.fromkeys(text for cut in asked for text in cut_problems(self.model, self.seq, cut)))

    # -- the batch ---------------------------------------------------------------------------------------------------

    def sequences(self, mesh: Factor) -> int:
        """Sequences per step of one data-parallel rank of ``mesh``; 0 if the batch does not divide evenly."""
        sequences, rest = divmod(self.tokens_per_step, self.seq * mesh.ranks)
        return 0 if rest else sequences

    def batches(self, cut: Cut = UNCUT) -> list[tuple[int, int]]:
        """Choices of ``(micro_batch, micro_batches)`` that keep all pipeline stages busy.

        Micro-batches have the size that was asked for, or any up to :data:`LARGEST_MICRO_BATCH` that divides the batch.
        """
        sequences = self.sequences(self.mesh_of(cut))
        most = min(LARGEST_MICRO_BATCH, self.largest_micro_batch or LARGEST_MICRO_BATCH)
        sizes = [self.micro_batch] if self.micro_batch else range(1, most + 1)
        dividing = [(size, sequences // size) for size in sizes if sequences and sequences % size == 0]
        return [(size, count) for size, count in dividing if keeps_busy(cut.pp, cut.schedule, count)]

    @property
    def recomputes(self) -> list[bool]:
        """Choices of ``recompute``."""
        return [False, True] if self.recompute is None else [self.recompute]

    # -- what a rank trains under a plan -----------------------------------------------------------------------------

    def parts(self, plan: Plan) -> tuple[ModelPart, ...]:
        """Parts of the model on a rank of the largest stage."""
        return parts(largest_stage(self.model, plan), plan.granularity, plan.tp, plan.ep)

    def units(self, plan: Plan, shard: int = 0) -> tuple[UnitInfo, ...]:
        """Sharding units on a rank of the largest stage that holds this ``P`` shard."""
        return units(largest_stage(self.model, plan), plan, shard)

    def workload(self, plan: Plan) -> Workload:
        """The work of one step on a rank of the largest stage."""
        parts = self.parts(plan)
        return Workload(parts, self.units(plan), self.seq, self.clip, exchanges=axis_costs(self, plan).exchanges(parts))


def axis_costs(job: TrainingJob, plan: Plan) -> AxisCosts:
    """What sharing the model takes under a plan of a job."""
    return AxisCosts(plan, job.model, job.seq, job.rates, HopCollectives(job.rates), job.cluster.nodes > 1)


def _candidate_cuts(job: TrainingJob, tp: tuple[int, ...] | None, pp: tuple[int, ...] | None) -> Iterator[Cut]:
    """Cuts to try, whether the runtime supports them or not."""
    return cuts(tp or powers_of_two(job.cluster.gpus_per_node), pp or powers_of_two(job.model.layers))


def refuse_context(plan: Plan) -> None:
    """Raise for a plan whose ranks share sequences: jobs count sequences by rank.

    Raises:
        SpecError: It has ``cp`` above 1.
    """
    if plan.cp > 1:
        raise SpecError("plan", [f"cp = {plan.cp}: the planner makes and compares plans without it; use cp = 1"])


def profiled_cluster(profile: Profile) -> ClusterSpec:
    """The cluster on which a profile was measured.

    Links and peak FLOP/s are the best measured values. Only tables and MFU show them; predictions use the profile.
    """
    best = {
        "inside": [row for row in profile.collectives if row.nodes == 1],
        "nic": [row for row in profile.collectives if row.local == 1 and row.nodes > 1 and row.groups == "all"],
    }
    together = {"inside": 1, "nic": profile.gpus_per_node}
    links = {
        key: {"bandwidth": max((8 * row.sent * together[key] / row.seconds for row in rows), default=1e12)}
        for key, rows in best.items()
    }
    rates = {row.dtype: 3 * row.flops / (row.forward + row.backward) for row in profile.compute if row.part == "block"}
    return ClusterSpec.parse(
        {
            "name": f"{profile.device}, profiled",
            "nodes": profile.nodes,
            "gpus_per_node": profile.gpus_per_node,
            "memory": profile.memory,
            "peak_flops": rates or {"bfloat16": 1e12},
            "links": links,
        },
        "profile",
    )


# -- why a job cannot be trained -------------------------------------------------------------------------------------


def _why_no_cut(job: TrainingJob) -> str:
    """Why the runtime supports none of the job's cuts and batches, with the nearest figures that would do."""
    meshes, problems = _meshes(job)
    if not meshes:
        return "; ".join(dict.fromkeys(problems))
    cut, mesh = min(meshes.items(), key=lambda item: (item[1].ranks, item[0].ways))
    tokens_per_round = job.seq * mesh.ranks
    sequences, rest = divmod(job.tokens_per_step, tokens_per_round)
    if rest or not sequences:
        sharers = "GPUs" if cut == UNCUT else f"data-parallel ranks (tp = {cut.tp}, pp = {cut.pp})"
        nearest = max(1, round(job.tokens_per_step / tokens_per_round)) * tokens_per_round
        return (
            f"tokens-per-step = {job.tokens_per_step:,} is not a multiple of seq x {sharers} = {job.seq:,} x "
            f"{mesh.ranks:,} = {tokens_per_round:,}: every rank needs the same number of sequences; the nearest "
            f"valid value is {nearest:,}{_fewer_data_parallel_ranks(job)}"
        )
    if job.micro_batch and sequences % job.micro_batch:
        divisors = ", ".join(str(d) for d in range(1, sequences + 1) if sequences % d == 0)
        return (
            f"micro-batch = {job.micro_batch} does not divide the {sequences} sequences that each rank trains in a "
            f"step; valid are {divisors}"
        )
    return (
        f"pp = {cut.pp} needs at least {cut.pp} micro-batches, in rounds of equal size, and each data-parallel rank "
        f"trains only {sequences} sequences in a step; use fewer stages or more tokens per step"
    )


def _meshes(job: TrainingJob) -> tuple[dict[Cut, Factor], list[str]]:
    """The data-parallel mesh of each cut that the runtime supports, and one sentence for each reason against others."""
    meshes: dict[Cut, Factor] = {}
    refusals: list[str] = []
    for cut in _candidate_cuts(job, job.tp, job.pp):
        problems = cut_problems(job.model, job.seq, cut)
        mesh = divided(job.mesh, cut)
        if mesh is None:
            problems.append(
                f"tp = {cut.tp} and pp = {cut.pp} do not divide {job.mesh.nodes} nodes of {job.mesh.local} GPUs"
            )
        elif not problems:
            meshes[cut] = mesh
        refusals += problems
    return meshes, refusals


def _fewer_data_parallel_ranks(job: TrainingJob) -> str:
    """The remedy by tensor and pipeline parallelism, if there is one, as the end of a sentence."""
    if (job.tp, job.pp) != ((1,), (1,)):
        return ""
    allowed = (cut for cut in _candidate_cuts(job, None, None) if job.allows(cut))
    cut = min(allowed, key=lambda cut: (cut.ways, cut.pp), default=None)
    return f"; or use fewer data-parallel ranks with --tp {cut.tp} --pp {cut.pp}" if cut else ""
