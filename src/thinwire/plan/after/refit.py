"""A profile that fits a run: every part of it that the run has used, scaled to what the run measured of that part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from thinwire.plan.after.compare import enough_rows, job_of, measured_figure
from thinwire.plan.after.culprit import measured_parts
from thinwire.plan.after.expected import CODECS, COMPUTATION, MEMORY, STEP, TRANSFERS, WAITING, lane_seconds, times
from thinwire.plan.priced import price_plan
from thinwire.program import Scope
from thinwire.record import RunRecord, read_run, steady
from thinwire.spec.plan_parts.residence import Residence
from thinwire.spec.profile import CodecRow, CollectiveRow, Profile

_ROUNDS: Final = 4
"""How often parts are fitted in turn: copies of a lane's values are computation, and change with it."""

_LEAST: Final = 0.01
"""Least factor of a part. A run that asks for less spends its lane on something else, and tells nothing of the part."""

_OF_THE_HOST: Final = ("up_seconds", "down_seconds", "host_update_seconds")
"""What a run uses only if states live on the host."""

_SHARE: Final = 0.01
"""Share of the busiest lane below which a part's seconds tell nothing of it."""


@dataclass(frozen=True)
class Refit:
    """A profile that fits a run.

    Attributes:
        profile: The profile.
        factors: By what each part that the run used was multiplied; a part that is not named stays as it was.
    """

    profile: Profile
    factors: Mapping[str, float]


def refit(run: Path, profile: Profile) -> Refit:
    """Scale each part of a profile so that it takes as long as in a run: computation, the transfers of each collective
    on each kind of link, and each codec, as long as the run's figures differ less for it. A collective or codec is
    scaled only if the lanes that use it come closer by that alone. Memory before a rank has a model becomes the run's.
    The margin grows to what the run needed beyond its prediction.

    Arguments and errors are those of :func:`~thinwire.plan.after.compare.compare`.
    """
    record = read_run(run)
    found = _fitted_figures(record, profile)
    fitted, factors, error = profile, dict[str, float](), _error(record, profile, found)
    for _ in range(_ROUNDS):
        expected = _expected(record, fitted)[COMPUTATION]
        pace = found[COMPUTATION] / expected if found[COMPUTATION] > 0 and expected else 1.0
        changes, tried = {COMPUTATION: pace}, fitted.paced(pace, codecs=False)
        of_lanes = _lane_error(record, tried, found)
        for part, factor in _lane_factors(record, tried, found).items():
            if factors.get(part, 1.0) * factor < _LEAST:
                continue
            scaled = _scaled(tried, part, factor)
            if (less := _lane_error(record, scaled, found)) < of_lanes:
                tried, changes[part], of_lanes = scaled, factor, less
        before, error = error, _error(record, tried, found)
        if error >= before:
            break
        fitted = tried
        for part, factor in changes.items():
            factors[part] = factors.get(part, 1.0) * factor
    if record.plan.residence == Residence():
        fitted = fitted.with_(**{name: getattr(profile, name) for name in _OF_THE_HOST})
    return Refit(_with_memory(record, fitted), factors)


def _with_memory(run: RunRecord, profile: Profile) -> Profile:
    """What a run tells of memory: what its ranks used before the model, and what they needed beyond the prediction."""
    job = job_of(run, profile)
    predicted = price_plan(job, run.plan).memory.total
    measured = measured_figure(MEMORY, steady(run), run.plan.ranks) or 0.0
    margin = min(1.0, max(profile.memory_margin, measured / predicted - 1))
    return profile.with_(base_memory=job.overhead, memory_margin=margin)


def _fitted_figures(run: RunRecord, profile: Profile) -> dict[str, float]:
    """What parts are fitted to, and the step: as a run measured them, without the lag of a slow rank in transfers."""
    rows, ranks = enough_rows(run), run.plan.ranks
    parts = measured_parts(rows, ranks)
    step = measured_figure(STEP, rows, ranks) or 0.0
    of_lanes = {name: parts[name] for name in parts if name.startswith((TRANSFERS, CODECS)) and parts[name]}
    own = parts.get(COMPUTATION)
    if own is None:  # older records do not have the own work of ranks
        waits = (measured_figure(name, rows, ranks) for name in _expected(run, profile) if name.startswith(WAITING))
        own = step - sum(filter(None, waits))
    return {STEP: step, COMPUTATION: own, **of_lanes}


def _expected(run: RunRecord, profile: Profile) -> dict[str, float]:
    """The figures of a run's step, by a profile."""
    job = job_of(run, profile)
    return {figure.name: figure.amount for figure in times(job, price_plan(job, run.plan))}


def _error(run: RunRecord, profile: Profile, found: Mapping[str, float]) -> float:
    """Seconds by which figures of a run differ from what a profile expects of them, added up."""
    expected = _expected(run, profile)
    return sum(abs(expected[name] - amount) for name, amount in found.items())


def _lane_error(run: RunRecord, profile: Profile, found: Mapping[str, float]) -> float:
    """The part of :func:`_error` that transfers and codecs have, whatever else the step takes."""
    expected = lane_seconds(job_of(run, profile), run.plan)
    return sum(abs(seconds - found[name]) for name, seconds in expected.items() if name in found)


def _part_of(row: CollectiveRow | CodecRow) -> str:
    """The rows of a profile that are right or wrong together: of a collective on a kind of link, or of a codec."""
    if isinstance(row, CodecRow):
        return f"codec {row.codec}"
    return f"{row.kind} {Scope.INSIDE if row.nodes == 1 else Scope.ACROSS}"


def _scaled(profile: Profile, part: str, factor: float) -> Profile:
    """The profile with the rows of a part multiplied."""
    return profile.with_(
        collectives=tuple(row.scaled(factor) if _part_of(row) == part else row for row in profile.collectives),
        codecs=tuple(row.scaled(factor) if _part_of(row) == part else row for row in profile.codecs),
    )


def _lane_factors(run: RunRecord, profile: Profile, found: Mapping[str, float]) -> dict[str, float]:
    """The smallest changes of parts after which transfers and codecs of lanes take as long as was measured.

    A lane's seconds are linear in the seconds of each part, so that two evaluations give the share of each part.
    """
    names = [name for name in found if name.startswith((TRANSFERS, CODECS))]
    if not names:
        return {}
    now = lane_seconds(job_of(run, profile), run.plan)
    parts, shares = [], []
    for part in [*sorted(set(map(_part_of, profile.collectives))), *sorted(set(map(_part_of, profile.codecs)))]:
        changed = lane_seconds(job_of(run, _scaled(profile, part, 2.0)), run.plan)
        share = [changed[name] - now[name] for name in names]
        if any(share):
            parts.append(part)
            shares.append(share)
    if not parts:
        return {}
    wrong = np.array([found[name] - now[name] for name in names])
    matters = _SHARE * max(found[name] for name in names) * np.eye(len(parts))
    matrix = np.vstack([np.array(shares).T, matters])
    changes, *_ = np.linalg.lstsq(matrix, np.concatenate([wrong, np.zeros(len(parts))]), rcond=None)
    return {part: 1 + float(change) for part, change in zip(parts, changes, strict=True)}
