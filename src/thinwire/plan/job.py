"""What is asked of the planner, and what it answers with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from thinwire.cost import OVERHEAD, Memory, Part, ProfiledRates, Rates, parts, units
from thinwire.errors import SpecError
from thinwire.program import UnitInfo
from thinwire.sim import Simulated, Workload
from thinwire.spec import ClusterSpec, Factor, ModelSpec, Plan
from thinwire.spec.profile import Profile

__all__ = ["CODEC_LEVELS", "Candidate", "CodecLevel", "Job", "profiled_cluster"]

CodecLevel = Literal["none", "lossless", "standard", "aggressive"]

CODEC_LEVELS: dict[CodecLevel, dict[str, tuple[str, ...]]] = {
    "none": {"gather": ("none",), "reduce_intra": ("none",), "reduce_inter": ("none",), "spread": ("none",)},
    "lossless": {
        "gather": ("none", "exp3"),
        "reduce_intra": ("none", "mpc"),
        "reduce_inter": ("none", "mpc"),
        "spread": ("none", "exp3"),
    },
    "standard": {
        "gather": ("none", "int8:256"),
        "reduce_intra": ("none", "int8:256"),
        "reduce_inter": ("none", "int8:256", "int4:256"),
        "spread": ("none", "int8:256"),
    },
    "aggressive": {
        "gather": ("none", "int8:256", "int6:256"),
        "reduce_intra": ("none", "int8:256", "int4:256"),
        "reduce_inter": ("none", "int8:256", "int4:256", "int3:256"),
        "spread": ("none", "int8:256", "int6:256"),
    },
}
"""The codecs that the search may choose from, by field of ``wire``; the first is the plainest."""


@dataclass(frozen=True)
class Job:
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

    def __post_init__(self) -> None:
        if mistakes := list(self._mistakes()):
            raise SpecError("plan", mistakes)

    def _mistakes(self) -> Iterator[str]:
        per_rank = self.seq * self.cluster.gpus
        sequences, rest = divmod(self.tokens_per_step, per_rank)
        if rest or not sequences:
            near = max(1, round(self.tokens_per_step / per_rank)) * per_rank
            yield (
                f"tokens-per-step = {self.tokens_per_step:,} is not a multiple of seq x GPUs = {self.seq:,} x "
                f"{self.cluster.gpus:,} = {per_rank:,}: every rank needs the same number of sequences; the nearest "
                f"valid figure is {near:,}"
            )
        elif self.micro_batch and sequences % self.micro_batch:
            yield (
                f"micro-batch = {self.micro_batch} does not divide the {sequences} sequences that each rank has in a "
                f"step; valid are {', '.join(str(d) for d in range(1, sequences + 1) if sequences % d == 0)}"
            )

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

    @property
    def sequences(self) -> int:
        """Of one rank in one step: micro-batch times micro-batches."""
        return self.tokens_per_step // (self.seq * self.cluster.gpus)

    @property
    def batches(self) -> list[tuple[int, int]]:
        """Choices of ``(micro_batch, micro_batches)``: powers of two, or what was asked for."""
        if self.micro_batch:
            return [(self.micro_batch, self.sequences // self.micro_batch)]
        sizes = [1 << k for k in range(6) if self.sequences % (1 << k) == 0]
        return [(size, self.sequences // size) for size in sizes]

    @property
    def recomputes(self) -> list[bool]:
        """Choices of ``recompute``."""
        return [False, True] if self.recompute is None else [self.recompute]

    @property
    def peak_flops(self) -> float:
        """Of one accelerator, in the compute dtype."""
        peaks = self.cluster.peak_flops
        return peaks.get(self.compute_dtype) or peaks.get("float16") or max(peaks.values())

    def parts(self, plan: Plan) -> tuple[Part, ...]:
        """The model's parts under a plan."""
        return parts(self.model, plan.granularity)

    def units(self, plan: Plan) -> tuple[UnitInfo, ...]:
        """The model's units under a plan."""
        return units(self.model, plan)

    def workload(self, plan: Plan) -> Workload:
        """What a step trains."""
        return Workload(self.parts(plan), self.units(plan), self.seq, self.clip)


def profiled_cluster(profile: Profile) -> ClusterSpec:
    """The cluster of a profile: links and peak are the best that was measured, which only tables and MFU show."""
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


@dataclass(frozen=True)
class Candidate:
    """One plan with its predictions.

    Attributes:
        plan: the decision, ``micro_batch``, ``micro_batches`` and ``recompute`` included.
        simulated: its step.
        memory: bytes of a rank.
        fits: whether that is within the accelerator's.
        label: the classic system whose plan it is, or how it was found.
    """

    plan: Plan
    simulated: Simulated
    memory: Memory
    fits: bool
    label: str | None = None

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.simulated.seconds

    def tokens_per_gpu_second(self, job: Job) -> float:
        """TGS."""
        return job.tokens_per_step / self.seconds / job.cluster.gpus

    def mfu(self, job: Job) -> float:
        """Model FLOPs utilisation, recomputation not counted."""
        flops = job.model.flops_per_token(job.seq, causal=job.causal_flops)
        return self.tokens_per_gpu_second(job) * flops / job.peak_flops

    def cost_per_billion_tokens(self, job: Job) -> float | None:
        """In the currency of ``price_per_gpu_hour``; ``None`` without a price."""
        price = job.cluster.price_per_gpu_hour
        return None if price is None else price * 1e9 / self.tokens_per_gpu_second(job) / 3600
