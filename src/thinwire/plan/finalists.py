"""The plans that a run tries before it chooses: those that a prediction cannot tell apart, and the presets.

A prediction has an error. Plans whose intervals of error overlap with that of the predicted winner may be faster than
it, and a preset is what a user would name instead.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from typing import Final

from thinwire.cost import ProfiledRates
from thinwire.errors import SpecError
from thinwire.plan.automatic import Chosen, Freedom, with_kept
from thinwire.plan.explain import quartile_seconds
from thinwire.plan.priced import PricedPlan
from thinwire.plan.training_job import CODEC_LEVELS, CodecLevel
from thinwire.spec import Plan
from thinwire.spec.plan_parts.presets import PRESETS

STEP_ERROR: Final = 0.06
"""Median error of a predicted step, as docs/results.md has it for the planner."""

_SEARCHED: Final = 3
"""Most plans of the search: presets come next, and the time of a race is short."""


def finalists(chosen: Chosen, template: Plan, free: Freedom) -> tuple[PricedPlan, ...]:
    """The plans to try, the predicted winner first, the others by their predicted steps.

    Args:
        chosen: The choice by prediction.
        template: The run's own plan, which decides the batch of presets and keeps what the search does not decide.
        free: What the search was free to choose; presets with codecs beyond its level are left out.

    Returns:
        Plans that fit into memory and differ in more than their names. The labels of presets are their names.
    """
    found = [chosen.predicted, *_overlapping(chosen, template), *_presets(chosen, template, free.codecs)]
    distinct: dict[str, PricedPlan] = {}
    for priced in found:
        distinct.setdefault(priced.plan.fingerprint(), priced)
    first, *others = distinct.values()
    return first, *sorted(others, key=lambda priced: priced.seconds)


def _overlapping(chosen: Chosen, template: Plan) -> list[PricedPlan]:
    """Plans of the search whose interval of error overlaps with the winner's."""
    error = _error(chosen)
    limit = chosen.predicted.seconds * (1 + error) / (1 - error)
    near = (priced for priced in chosen.searched.candidates[1:] if priced.seconds <= limit)
    distinct = {_outline(chosen.searched.candidates[0].plan)}
    fastest: list[PricedPlan] = []
    for priced in sorted(near, key=lambda priced: priced.seconds):
        if len(fastest) < _SEARCHED - 1 and _outline(priced.plan) not in distinct:
            distinct.add(_outline(priced.plan))
            fastest.append(priced)
    return list(_priced(chosen, template, [(priced.plan, None) for priced in fastest]))


def _outline(plan: Plan) -> tuple[object, ...]:
    """What tells plans of a search apart by more than knobs that change little."""
    names = ("params", "grads", "optimizer", "secondary", "wire", "micro_batch", "recompute", "tp", "pp")
    return tuple(getattr(plan, name) for name in names)


def _error(chosen: Chosen) -> float:
    """Error of a predicted step as a share of it: half of what the profile's quartiles leave open, what races under it
    have shown, or :data:`STEP_ERROR` if that is more."""
    quartiles = quartile_seconds(chosen.job, chosen.predicted)
    spread = 0.0 if quartiles is None else (quartiles[1] - quartiles[0]) / 2 / chosen.predicted.seconds
    return min(0.5, max(STEP_ERROR, spread, _shown(chosen)))


def _shown(chosen: Chosen) -> float:
    """Median error of the steps that the profile has measured. What all of them have in common reorders no plans."""
    rates = chosen.job.rates
    rows = rates.profile.steps if isinstance(rates, ProfiledRates) else ()
    if not rows:
        return 0.0
    ratios = [row.seconds / row.predicted for row in rows]
    pace = statistics.median(ratios)
    return statistics.median(abs(ratio / pace - 1) for ratio in ratios)


def _presets(chosen: Chosen, template: Plan, level: CodecLevel) -> list[PricedPlan]:
    """The presets as ``--plan preset:NAME`` would train them, if they fit and their codecs are allowed."""
    mesh, batch = template.mesh, ("compute_dtype", "micro_batch", "micro_batches", "recompute")
    kept = {name: getattr(template, name) for name in (*batch, "tp", "pp", "pipeline_schedule", "residence")}

    def plans() -> Iterator[tuple[Plan, str]]:
        for name, preset in PRESETS.items():
            if preset.islands is not None:
                continue
            try:
                plan = Plan.preset(name, nodes=mesh.nodes, local=mesh.local, **kept)
            except SpecError:  # it has no meaning on this mesh, or with what the run's plan keeps
                continue
            if _allowed(plan, level):
                yield plan, name

    return list(_priced(chosen, template, plans()))


def _allowed(plan: Plan, level: CodecLevel) -> bool:
    codecs = {name: codec for name, codec in plan.wire.codecs().items() if not codec.is_none}
    return all(str(codec) in CODEC_LEVELS[level].get(name, ()) for name, codec in codecs.items())


def _priced(chosen: Chosen, template: Plan, plans: Iterable[tuple[Plan, str | None]]) -> Iterator[PricedPlan]:
    for plan, label in plans:
        try:
            kept = with_kept(plan, template)
        except SpecError:  # the two do not go together
            continue
        priced = chosen.searched.simulations.price(chosen.job, kept, label)
        if priced.fits:
            yield priced
