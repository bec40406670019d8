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
    """Seconds that tensor, pipeline, expert and context parallelism add to a step; computation hides none of them.

    Attributes:
        sums: Seconds of sums over tensor-parallel ranks, which are part of computation.
        idle: Seconds during which ranks idle while the pipeline fills and drains.
        messages: Seconds of waiting for messages between stages.
        experts: Seconds of exchanging tokens with the experts of other ranks, which are part of computation.
        context: Seconds of gathering keys and values, and of reducing their gradients, which are part of computation.
    """

    sums: float = 0.0
    idle: float = 0.0
    messages: float = 0.0
    experts: float = 0.0
    context: float = 0.0

    @property
    def inside(self) -> float:
        """Seconds that are part of computation."""
        return self.sums + self.experts + self.context


@dataclass(frozen=True)
class Candidate:
    """A plan with its predicted step time and memory.

    Attributes:
        plan: The plan, including ``micro_batch``, ``micro_batches`` and ``recompute``.
        simulated: The simulated step; its seconds include those of tensor and pipeline parallelism.
        memory: Bytes on the rank that needs the most memory.
        fits: Whether these bytes fit into an accelerator's memory.
        label: Name of the classic system whose plan this is; ``None`` for a plan of the search.
        axes: Seconds that tensor and pipeline parallelism add.
    """

    plan: Plan
    simulated: Simulated
    memory: Memory
    fits: bool
    label: str | None = None
    axes: AxisSeconds = AxisSeconds()

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        return self.simulated.seconds

    def tokens_per_gpu_second(self, job: TrainingJob) -> float:
        """Tokens per second and GPU (TGS)."""
        return job.tokens_per_step / self.seconds / job.cluster.gpus

    def mfu(self, job: TrainingJob) -> float:
        """Model FLOPs utilisation (MFU); recomputation does not count."""
        flops = job.model.flops_per_token(job.seq, causal=job.causal_flops)
        return self.tokens_per_gpu_second(job) * flops / job.peak_flops

    def cost_per_billion_tokens(self, job: TrainingJob) -> float | None:
        """Price of a billion tokens, in the currency of ``price_per_gpu_hour``; ``None`` if that is unset."""
        price = job.cluster.price_per_gpu_hour
        return None if price is None else price * 1e9 / self.tokens_per_gpu_second(job) / 3600
