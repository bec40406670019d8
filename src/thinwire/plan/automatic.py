"""The plan that a search chooses for a profiled cluster, as ``plan = "auto"`` and ``--plan auto`` ask for it."""

from __future__ import annotations

from thinwire.cost import ProfiledRates
from thinwire.errors import UsageError
from thinwire.plan.explain import remedies, shortage, summary
from thinwire.plan.profiled import profiled_cluster
from thinwire.plan.search import Searched, search
from thinwire.plan.training_job import TrainingJob
from thinwire.spec import ModelSpec, Plan
from thinwire.spec.profile import Profile
from thinwire.units import format_bytes

__all__ = ["profiled_job", "search_fitting"]


def profiled_job(model: ModelSpec, seq: int, template: Plan, profile: Profile, *, clip: bool) -> TrainingJob:
    """Describe a training job on a cluster that was profiled.

    Args:
        model: Shape of the model.
        seq: Number of tokens in a sequence.
        template: A plan with the job's mesh, batch, dtype and recomputation.
        profile: Profile of the cluster.
        clip: Whether gradients are clipped by their norm.
    """
    return TrainingJob(
        model,
        profiled_cluster(profile),
        template.world * template.micro_batch * template.micro_batches * seq,
        seq,
        micro_batch=template.micro_batch,
        recompute=template.recompute,
        compute_dtype=template.compute_dtype,
        clip=clip,
        rates=ProfiledRates(profile, model, template.compute_dtype),
        overhead=profile.base_memory,
    )


def search_fitting(job: TrainingJob, asked: str) -> Searched:
    """Search for plans that fit into memory.

    Args:
        job: The training job.
        asked: The option that asks for the search, for the message.

    Raises:
        UsageError: No plan fits; the message lists remedies.
    """
    searched = search(job)
    if searched.candidates:
        return searched
    smallest, lacking = shortage(job)
    changes = "; ".join(remedy.change for remedy in remedies(job)) or "more ranks or a smaller model"
    raise UsageError(
        f"{asked}: nothing fits; the smallest plan ({summary(smallest)}) lacks {format_bytes(lacking)} on every rank; "
        f"what would do: {changes}"
    )
