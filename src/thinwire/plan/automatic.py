"""The plan that a search chooses for a profiled cluster, as ``plan = "auto"`` and ``--plan auto`` ask for it.

A run takes the choice as it is: factors, codecs, micro-batch, recomputation, tensor and pipeline parallelism, and every
other knob that the search turns. What the search does not decide, such as dtypes, stays as the run's own plan has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from thinwire.errors import SpecError, UsageError
from thinwire.plan.explain import remedies, shortage, summary
from thinwire.plan.priced import PricedPlan
from thinwire.plan.search import Searched, search, search_wider
from thinwire.plan.training_job import CodecLevel, TrainingJob
from thinwire.spec import ModelSpec, Plan
from thinwire.spec.profile import Profile
from thinwire.units import format_bytes

KEPT: Final = (
    "compute_dtype", "accumulate_dtype", "reduce_dtype", "grad_reduce", "placement", "topology", "units",
    "sequence_parallel",
)  # fmt: skip
"""Keys of a plan that the search does not decide."""

KEPT_WIRE: Final = ("exclude", "compress_until")
"""Keys of ``wire`` that the search does not decide."""

LOSSY: Final[tuple[CodecLevel, ...]] = ("standard", "aggressive")
"""Levels of compression that need a word of consent."""


@dataclass(frozen=True, slots=True)
class Freedom:
    """What a search may choose for a run.

    Attributes:
        micro_batch: Sequences of a micro-batch, if the loop fixes it; ``None`` lets the search divide the sequences of
            a step.
        largest_micro_batch: Most sequences of a micro-batch.
        recompute: Whether blocks are recomputed, if the loop fixes it.
        cuts: Whether the model can be cut for tensor and pipeline parallelism. Both are tried if no data-parallel plan
            fits. If the run's plan has ``tp`` or ``pp`` already, these numbers stay.
        codecs: How lossy codecs may be.
    """

    micro_batch: int | None = None
    largest_micro_batch: int | None = None
    recompute: bool | None = None
    cuts: bool = False
    codecs: CodecLevel = "lossless"


@dataclass(frozen=True)
class Chosen:
    """A choice for a run.

    Attributes:
        job: The job that was searched for.
        searched: Result of the search.
        plan: The plan of the run: the best of the search, with what the run's own plan keeps.
        predicted: Predicted step and memory of that plan.
    """

    job: TrainingJob
    searched: Searched
    plan: Plan
    predicted: PricedPlan


def profiled_job(
    model: ModelSpec, seq: int, template: Plan, profile: Profile, *, clip: bool, free: Freedom | None = None
) -> TrainingJob:
    """Describe a training job on a cluster that was profiled.

    Args:
        model: Shape of the model.
        seq: Number of tokens in a sequence.
        template: A plan with the job's ranks, dtype and batch: micro-batch times micro-batches is the number of
            sequences that a rank trains in a step.
        profile: Profile of the cluster.
        clip: Whether gradients are clipped by their norm.
        free: What the search may choose; by default neither micro-batch nor recomputation.
    """
    free = free or Freedom(micro_batch=template.micro_batch, recompute=template.recompute)
    return TrainingJob.of(
        model,
        seq,
        None,
        profile,
        template,
        micro_batch=free.micro_batch,
        largest_micro_batch=free.largest_micro_batch,
        recompute=free.recompute,
        residences=(template.residence,),
        codecs=free.codecs,
        clip=clip,
    )


def choose(job: TrainingJob, template: Plan, asked: str, *, free: Freedom) -> Chosen:
    """Choose the plan of a run, whose own plan, the template, keeps what the search does not decide. ``asked`` is the
    option that asks for the choice, for messages.

    Raises:
        UsageError: The run's plan has islands or shares sequences; or no plan fits, and the message lists remedies.
    """
    if template.islands is not None:
        raise UsageError(
            f"{asked} chooses among plans whose ranks step together, and the run's plan has islands = "
            f"{template.num_islands}; leave the islands out, or name a plan"
        )
    if template.cp > 1:
        raise UsageError(
            f"{asked} chooses among plans whose ranks have sequences of their own, and the run's plan has cp = "
            f"{template.cp}; leave cp out, or name a plan"
        )
    job, searched = _widened(job, template, asked, free)
    plan = with_kept(searched.candidates[0].plan, template)
    predicted = searched.simulations.price(job, plan)
    if not predicted.fits:
        lacking = format_bytes(predicted.memory.total - job.room)
        raise UsageError(
            f"{asked}: the best plan fits, but with what the run's plan keeps, such as "
            f"accumulate_dtype = {plan.accumulate_dtype}, it lacks {lacking}; leave them out, or name a plan"
        )
    return Chosen(job, searched, plan, predicted)


def with_kept(plan: Plan, template: Plan) -> Plan:
    """The plan of a search with what the run's own plan keeps.

    Raises:
        SpecError: The two do not go together.
    """
    kept: dict[str, Any] = {name: getattr(template, name) for name in KEPT}
    wire = {name: getattr(template.wire, name) for name in KEPT_WIRE}
    if template.partition == "inter":  # some optimizers need whole tensors
        kept["partition"] = "inter"
    return plan.with_(name="auto", wire=wire, **kept)


def replaced_keys(plan: Plan, template: Plan, written: Iterable[str]) -> list[str]:
    """One sentence for each key written in the recipe of the run's own plan, the template, that the search decides
    otherwise."""
    ours, theirs = plan.to_dict(), template.to_dict()
    decided = [name for name in written if name in type(plan).model_fields and name not in (*KEPT, "name", "mesh")]
    return [
        f"auto decides {name}: {json.dumps(ours[name])} replaces {json.dumps(theirs[name])} of the recipe's plan"
        for name in decided
        if getattr(template, name) != getattr(plan, name)
    ]


def _widened(job: TrainingJob, template: Plan, asked: str, free: Freedom) -> tuple[TrainingJob, Searched]:
    """The search, with tensor and pipeline parallelism if no data-parallel plan fits and the model can be cut."""
    uncut = template.tp == template.pp == 1 and template.topology is None and template.placement is None
    if free.cuts and uncut:
        wider, searched = search_wider(job)
        if searched.candidates:
            return wider, searched
    return job, search_fitting(job, asked)


def search_fitting(job: TrainingJob, asked: str) -> Searched:
    """Search for plans that fit into memory. ``asked`` is the option that asks for the search, for the message.

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


def lossy_codecs(job: TrainingJob, searched: Searched, plan: Plan) -> str | None:
    """One sentence about lossy codecs: which the plan that was chosen uses by consent, or what they would gain;
    ``None`` if there is nothing to say."""
    used = [f"{name} {codec}" for name, codec in plan.wire.codecs().items() if not codec.is_lossless]
    if used:
        feedback = " with error feedback" if plan.wire.error_feedback else ""
        return f"lossy codecs, as --codecs {job.codecs} allows: {', '.join(used)}{feedback}"
    if job.codecs in LOSSY:
        return None
    before = searched.candidates[0].seconds
    best = _with_lossy(job, searched)
    if best is None or best.seconds * (1 + job.tie) >= before:
        return None
    return (
        f"no lossy codecs without consent; --codecs standard would allow {summary(best.plan)}, predicted "
        f"{best.seconds:.3f} s a step ({best.seconds / before - 1:+.0%})"
    )


def _with_lossy(job: TrainingJob, searched: Searched) -> PricedPlan | None:
    """The best plan with lossy codecs; ``None`` if their prices are unknown."""
    try:
        found = search(replace(job, codecs="standard"), simulations=searched.simulations).candidates
    except SpecError:  # the profile has no row of any codec
        return None
    return found[0] if found else None
