"""Plans that share experts: candidates beside those of the search, which give every rank all experts."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.plan.priced import PricedPlan, Simulations
from thinwire.plan.training_job import TrainingJob
from thinwire.spec import Plan

SHARDED = ("zero1", "zero2", "zero3", "hsdp")
"""Presets of which plans that share experts are made."""


def sharings(job: TrainingJob) -> list[int]:
    """Numbers of ranks that can share the experts of the job's model; empty for a dense model."""
    experts = job.model.experts or 1
    return [ways for ways in range(2, experts + 1) if experts % ways == 0 and job.mesh.group(ways) is not None]


def expert_candidates(job: TrainingJob, simulations: Simulations, bucket_bytes: int) -> list[PricedPlan]:
    """The fastest plan that fits for each number of ranks that share experts; plans have no tensor and pipeline
    parallelism, and no codecs."""
    found = []
    for ways in sharings(job):
        plans = (
            Plan.preset(
                name,
                nodes=job.mesh.nodes,
                local=job.mesh.local,
                compute_dtype=job.compute_dtype,
                bucket_bytes=bucket_bytes,
                ep=ways,
            )
            for name in SHARDED
        )
        fitting = [plan for each in plans for plan in _batched(job, simulations, each)]
        priced = [simulations.price(job, plan, f"ep {ways}") for plan in fitting]
        if priced:
            found.append(min(priced, key=lambda candidate: candidate.seconds))
    return found


def _batched(job: TrainingJob, simulations: Simulations, plan: Plan) -> Iterator[Plan]:
    """A plan with the largest micro-batch that fits without recomputation, or else with it."""
    for recompute in job.recomputes:
        for size, count in sorted(job.batches(), reverse=True):
            batched = plan.with_(micro_batch=size, micro_batches=count, recompute=recompute)
            if simulations.memory(job, batched).total <= job.room:
                yield batched
                return
