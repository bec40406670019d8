"""A plan with its predicted step time and memory."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.cost import Memory
from thinwire.plan.training_job import TrainingJob
from thinwire.sim import Simulated
from thinwire.spec import Plan

__all__ = ["AxisSeconds", "Candidate"]


@dataclass(frozen=True, slots=True)
class AxisSeconds:
    """Seconds of a step that tensor and pipeline parallelism add to it, all of them in the open.

    Attributes:
        sums: of tensor-parallel ranks, within computation.
        idle: while the pipeline fills and drains.
        messages: between stages meanwhile.
    """

    sums: float = 0.0
    idle: float = 0.0
    messages: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """One plan with its predictions.

    Attributes:
        plan: the decision, ``micro_batch``, ``micro_batches`` and ``recompute`` included.
        simulated: its step, with what tensor and pipeline parallelism add.
        memory: bytes of the rank that needs most.
        fits: whether that is within the accelerator's.
        label: the classic system whose plan it is, or how it was found.
    """

    plan: Plan
    simulated: Simulated
    memory: Memory
    fits: bool
    label: str | None = None
    axes: AxisSeconds = AxisSeconds()

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.simulated.seconds

    def tokens_per_gpu_second(self, job: TrainingJob) -> float:
        """TGS."""
        return job.tokens_per_step / self.seconds / job.cluster.gpus

    def mfu(self, job: TrainingJob) -> float:
        """Model FLOPs utilisation, recomputation not counted."""
        flops = job.model.flops_per_token(job.seq, causal=job.causal_flops)
        return self.tokens_per_gpu_second(job) * flops / job.peak_flops

    def cost_per_billion_tokens(self, job: TrainingJob) -> float | None:
        """In the currency of ``price_per_gpu_hour``; ``None`` without a price."""
        price = job.cluster.price_per_gpu_hour
        return None if price is None else price * 1e9 / self.tokens_per_gpu_second(job) / 3600
