"""What is asked of the planner, and what it answers with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from thinwire.cost import OVERHEAD, ModelPart, ProfiledRates, Rates, parts, units
from thinwire.cost.memory import stage_model, stages
from thinwire.errors import SpecError
from thinwire.plan.rules import UNCUT, Cut, cut_problems, cuts, divided, powers_of_two
from thinwire.program import UnitInfo
from thinwire.sim import Workload
from thinwire.spec import ClusterSpec, Factor, ModelSpec, Plan
from thinwire.spec.pipeline import keeps_busy

__all__ = ["CODEC_LEVELS", "CodecLevel", "TrainingJob"]

CodecLevel = Literal["none", "lossless", "standard", "aggressive"]

CODEC_LEVELS: dict[CodecLevel, dict[str, tuple[str, ...]]] = {
    "none": dict.fromkeys(("gather", "reduce_intra", "reduce_inter", "spread", "tp", "pp"), ("none",)),
    "lossless": {
        "gather": ("none", "exp3"),
        "reduce_intra": ("none", "mpc"),
        "reduce_inter": ("none", "mpc"),
        "spread": ("none", "exp3"),
        "tp": ("none",),
        "pp": ("none",),
    },
    "standard": {
        "gather": ("none", "int8:256"),
        "reduce_intra": ("none", "int8:256"),
        "reduce_inter": ("none", "int8:256", "int4:256"),
        "spread": ("none", "int8:256"),
        "tp": ("none", "int8:256"),
        "pp": ("none", "int8:256"),
    },
    "aggressive": {
        "gather": ("none", "int8:256", "int6:256"),
        "reduce_intra": ("none", "int8:256", "int4:256"),
        "reduce_inter": ("none", "int8:256", "int4:256", "int3:256"),
        "spread": ("none", "int8:256", "int6:256"),
        "tp": ("none", "int8:256", "int6:256"),
        "pp": ("none", "int8:256", "int6:256"),
    },
}
"""The codecs that the search may choose from, by field of ``wire``; the first is the plainest."""


@dataclass(frozen=True)
class TrainingJob:
    """A training job on a cluster.

    Attributes:
        model: its shape.
        cluster: the machine.
        tokens_per_step: of one optimizer step, over all ranks.
        seq: tokens of a sequence.
        micro_batch: sequences of a micro-batch on a rank; ``None`` lets the search choose.
        recompute: whether blocks are recomputed; ``None`` lets the search choose.
        codecs: how far codecs may go.
        compute_dtype: of forward and backward.
        clip: whether gradients are clipped by their norm.
        rates: how long everything takes.
        overhead: bytes of a rank in use before any model.
        causal_flops: whether MFU counts half of attention, as current Megatron-LM does.
        tp: tensor-parallel ranks to choose from; ``None``: powers of two up to a node's ranks.
        pp: pipeline stages to choose from; ``None``: powers of two up to the model's blocks.
    """

    model: ModelSpec
    cluster: ClusterSpec
    tokens_per_step: int
    seq: int
    micro_batch: int | None = None
    recompute: bool | None = None
    codecs: CodecLevel = "standard"
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    clip: bool = True
    rates: Rates = field(kw_only=True)
    overhead: int = OVERHEAD
    causal_flops: bool = False
    tp: tuple[int, ...] | None = (1,)
    pp: tuple[int, ...] | None = (1,)

    def __post_init__(self) -> None:
        if mistakes := list(self._mistakes()):
            raise SpecError("plan", mistakes)

    def _mistakes(self) -> Iterator[str]:
        if self.cuts:
            return
        possible, refused = self._meshes()
        if not possible:
            yield "; ".join(dict.fromkeys(refused))
            return
        cut, mesh = min(possible.items(), key=lambda item: (item[1].ranks, item[0].ways))
        per_rank = self.seq * mesh.ranks
        sequences, rest = divmod(self.tokens_per_step, per_rank)
        who = "GPUs" if cut == UNCUT else f"data-parallel ranks (tp = {cut.tp}, pp = {cut.pp})"
        if rest or not sequences:
            near = max(1, round(self.tokens_per_step / per_rank)) * per_rank
            fewer = self._with_fewer_data_parallel_ranks()
            yield (
                f"tokens-per-step = {self.tokens_per_step:,} is not a multiple of seq x {who} = {self.seq:,} x "
                f"{mesh.ranks:,} = {per_rank:,}: every rank needs the same number of sequences; the nearest "
                f"valid figure is {near:,}{fewer}"
            )
        elif self.micro_batch and sequences % self.micro_batch:
            yield (
                f"micro-batch = {self.micro_batch} does not divide the {sequences} sequences that each rank has in a "
                f"step; valid are {', '.join(str(d) for d in range(1, sequences + 1) if sequences % d == 0)}"
            )
        else:
            yield (
                f"pp = {cut.pp} needs as many micro-batches and in equal rounds, and each data-parallel rank has "
                f"{sequences} sequences in a step; take fewer stages, or more tokens a step"
            )

    def _with_fewer_data_parallel_ranks(self) -> str:
        """Whether tensor and pipeline parallelism would make the batch go, in words."""
        if (self.tp, self.pp) != ((1,), (1,)):
            return ""
        allowed = (cut for cut in _every(self, None, None) if self.allows(cut))
        cut = min(allowed, key=lambda cut: (cut.ways, cut.pp), default=None)
        return f"; or share ranks with --tp {cut.tp} --pp {cut.pp}" if cut else ""

    def _meshes(self) -> tuple[dict[Cut, Factor], list[str]]:
        """The data-parallel mesh of every cut that the runtime can make, and why it cannot make others."""
        found: dict[Cut, Factor] = {}
        refused: list[str] = []
        for cut in _every(self, self.tp, self.pp):
            problems = cut_problems(self.model, self.seq, cut)
            mesh = divided(self.mesh, cut)
            if mesh is None:
                problems.append(
                    f"tp = {cut.tp} and pp = {cut.pp} cannot share {self.mesh.nodes} nodes of {self.mesh.local} GPUs"
                )
            elif not problems:
                found[cut] = mesh
            refused += problems
        return found, refused

    def allows(self, cut: Cut) -> bool:
        """Whether the runtime can cut the model and the batch so."""
        mesh = divided(self.mesh, cut)
        return mesh is not None and not cut_problems(self.model, self.seq, cut) and bool(self.batches(cut))

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """Ways to cut the model that the runtime takes, plain data parallelism first."""
        return tuple(cut for cut in _every(self, self.tp, self.pp) if self.allows(cut))

    @property
    def refusals(self) -> list[str]:
        """Why the runtime would not cut this model in other ways that were asked for."""
        asked = [cut for cut in _every(self, self.tp, self.pp) if cut.schedule == UNCUT.schedule]
        return list(dict.fromkeys(text for cut in asked for text in cut_problems(self.model, self.seq, cut)))

    @property
    def tie(self) -> float:
        """Share by which predicted times may differ and still be a tie, which goes to the plan with fewer knobs.

        Published figures are what they are, and plans differ by nothing else; a profile is measured, and so noisy.
        """
        return 0.04 if isinstance(self.rates, ProfiledRates) else 0.01

    @property
    def on_host(self) -> bool:
        """Whether ranks live in the memory of a host, as in a profile without accelerators."""
        return isinstance(self.rates, ProfiledRates) and self.rates.profile.backend == "gloo"

    @property
    def mesh(self) -> Factor:
        """All ranks."""
        return Factor(local=self.cluster.gpus_per_node, nodes=self.cluster.nodes)

    def mesh_of(self, cut: Cut) -> Factor:
        """The data-parallel ranks that a cut leaves.

        Raises:
            SpecError: if the ranks cannot be dealt out so.
        """
        return self.mesh.data_parallel(cut.tp, cut.pp)

    def sequences(self, mesh: Factor) -> int:
        """Of one data-parallel rank in one step: micro-batch times micro-batches; 0 where they are not whole."""
        sequences, rest = divmod(self.tokens_per_step, self.seq * mesh.ranks)
        return 0 if rest else sequences

    def batches(self, cut: Cut = UNCUT) -> list[tuple[int, int]]:
        """Choices of ``(micro_batch, micro_batches)``: powers of two, or what was asked for; those that keep all stages
        busy."""
        sequences = self.sequences(self.mesh_of(cut))
        sizes = [self.micro_batch] if self.micro_batch else [1 << k for k in range(6)]
        found = [(size, sequences // size) for size in sizes if sequences and sequences % size == 0]
        return [(size, count) for size, count in found if keeps_busy(cut.pp, cut.schedule, count)]

    @property
    def recomputes(self) -> list[bool]:
        """Choices of ``recompute``."""
        return [False, True] if self.recompute is None else [self.recompute]

    @property
    def peak_flops(self) -> float:
        """Of one accelerator, in the compute dtype."""
        peaks = self.cluster.peak_flops
        return peaks.get(self.compute_dtype) or peaks.get("float16") or max(peaks.values())

    def stage(self, plan: Plan) -> ModelSpec:
        """What the rank of a pipeline has that has most to do, the last: as many blocks as any, and the head; and the
        embedding, which is the first one's and computes nothing, so that the time of both ends is covered."""
        return self.model if plan.pp == 1 else stage_model(self.model, stages(self.model.layers, plan)[-1].blocks)

    def parts(self, plan: Plan) -> tuple[ModelPart, ...]:
        """A rank's parts of the model under a plan."""
        return parts(self.stage(plan), plan.granularity, plan.tp)

    def units(self, plan: Plan) -> tuple[UnitInfo, ...]:
        """A rank's units under a plan."""
        return units(self.stage(plan), plan)

    def workload(self, plan: Plan) -> Workload:
        """What a rank trains in a step."""
        return Workload(self.parts(plan), self.units(plan), self.seq, self.clip)


def _every(job: TrainingJob, tp: tuple[int, ...] | None, pp: tuple[int, ...] | None) -> Iterator[Cut]:
    """Cuts to try, whether they go or not."""
    return cuts(tp or powers_of_two(job.cluster.gpus_per_node), pp or powers_of_two(job.model.layers))
