"""What a prediction rests on: measurements of this cluster, of another with the same accelerator, or neither."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from thinwire.cost import Basis, ProfiledRates, views_of
from thinwire.plan.candidates import Candidate
from thinwire.plan.simulations import candidate
from thinwire.plan.training_job import TrainingJob

__all__ = ["RestsOn", "rests_on"]

_WORST_FIRST: Final[tuple[Basis, ...]] = ("extrapolated", "measured elsewhere", "measured here")


@dataclass(frozen=True, slots=True)
class RestsOn:
    """What the parts of a predicted step rest on.

    Attributes:
        computation: Of forward and backward.
        transfers: Of collectives and codecs.
    """

    computation: Basis
    transfers: Basis

    @property
    def step(self) -> Basis:
        """Of the step: the weaker of the two."""
        return min(self.computation, self.transfers, key=_WORST_FIRST.index)


def rests_on(job: TrainingJob, row: Candidate) -> RestsOn:
    """What a candidate's step rests on.

    Args:
        job: The job.
        row: A plan for it.
    """
    bases = [
        rates.computing_basis(part, row.plan, job.seq)
        for rates in views_of(job.rates)
        for part in job.parts(row.plan)
        if part.matrices or part.attention_width or part.routed
    ]
    computation: Basis = min(bases, key=_WORST_FIRST.index, default=_WORST_FIRST[0])
    return RestsOn(computation, _transfers(job, row))


def _transfers(job: TrainingJob, row: Candidate) -> Basis:
    """Of collectives and codecs: a profile's rates say whether a step asked for something that was not measured."""
    if not isinstance(job.rates, ProfiledRates):
        return "extrapolated"
    rates = ProfiledRates(job.rates.profile, job.model, job.compute_dtype, job.rates.quartile)
    candidate(replace(job, rates=rates), row.plan)
    return "extrapolated" if rates.transfers_extrapolated else "measured here"
