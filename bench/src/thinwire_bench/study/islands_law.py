"""The loss law of ``thinwire plan --loss-budget``: fitted to the runs of a study of islands."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from thinwire.errors import UsageError
from thinwire.plan import LossLaw
from thinwire.spec.islands import Islands
from thinwire_bench.study.arms import LossStudy
from thinwire_bench.study.curves import Curve
from thinwire_bench.study.outcome import outcomes

__all__ = ["fitted"]

_WAYS: Final = {"INT4 with error feedback": "islands-4bit", "INT4, streaming": "islands-streaming"}
"""Arms that exchange another way, by what tables call it; each is compared with ``_EXACT``."""

_EXACT: Final = "islands-32"

_LEAST_POINTS: Final = 4
"""Three fit a line with something left over, and each run has to be left out once."""

_KEYS: Final = ("codec", "error_feedback", "fragments", "delay", "blend")
"""What makes a way to exchange."""

Point = tuple[int, int, float]
"""A run: islands, inner steps, percent above the baseline's run with its seed."""


def fitted(study: LossStudy, curves: Sequence[Curve]) -> LossLaw:
    """Fit the law to the finished runs of a study.

    Args:
        study: The study.
        curves: Its finished runs.

    Raises:
        UsageError: Too few arms have finished runs.
    """
    excess = {outcome.arm: outcome.excess for outcome in outcomes(study.spec, curves) if outcome.mean is not None}
    plans = {run.arm: run.plan.islands for run in study.runs if run.loop is None and run.plan.islands is not None}
    exact = {arm: islands for arm, islands in plans.items() if islands.codec.is_none and excess.get(arm)}
    others = {name: arm for name, arm in _WAYS.items() if excess.get(arm)}
    points = [(plan.count, plan.every, percent) for arm, plan in exact.items() for percent in excess[arm].values()]
    if _EXACT not in exact or len(exact) < 2 or len(points) < _LEAST_POINTS:
        raise UsageError(
            f"the loss law needs {_LEAST_POINTS} finished runs of {_EXACT} and of other arms with exact exchanges; "
            f"there are {len(points)}, of {', '.join(exact) or 'none'}"
        )
    base, slope = _fit(points)
    run = study.runs[0]
    of_step = (run.recipe.train.global_batch or 0) * run.recipe.train.seq
    return LossLaw.parse(
        {
            "parameters": run.recipe.model.shape(
                vocab=run.recipe.model.vocab or 0, seq=run.recipe.train.seq
            ).parameters,
            "tokens": run.steps * of_step,
            "trunk": run.trunk_steps * of_step,
            "tokens_per_step": of_step,
            "seeds": min(len(excess[arm]) for arm in (*exact, *others.values())),
            "islands": [min(point[0] for point in points), max(point[0] for point in points)],
            "every": [min(point[1] for point in points), max(point[1] for point in points)],
            "outers": _outers(exact.values()),
            "base": round(base, 4),
            "slope": round(slope, 4),
            "left_out": round(_left_out(points), 4),
            "ways": [
                {"name": "exact", "islands": _way(plans[_EXACT]), "percent": 0.0},
                *(
                    {
                        "name": name,
                        "islands": _way(plans[arm]),
                        "percent": round(_added(excess, arm), 4) + 0.0,  # + 0.0: never -0.0
                    }
                    for name, arm in others.items()
                ),
            ],
        },
        "the loss law",
    )


def _fit(points: Sequence[Point]) -> tuple[float, float]:
    """Least squares of ``(1 - 1/K) (base + slope log2 H)``."""
    shares = np.array([1 - 1 / count for count, _, _ in points])
    doublings = np.array([math.log2(every) for _, every, _ in points])
    values = np.array([percent for _, _, percent in points])
    (base, slope), *_ = np.linalg.lstsq(np.stack([shares, shares * doublings], 1), values, rcond=None)
    return float(base), float(slope)


def _left_out(points: Sequence[Point]) -> float:
    """Root mean square error for each run by a fit to the others."""
    errors = []
    for index, (count, every, percent) in enumerate(points):
        base, slope = _fit([*points[:index], *points[index + 1 :]])
        errors.append((1 - 1 / count) * (base + slope * math.log2(every)) - percent)
    return math.sqrt(statistics.fmean(error**2 for error in errors))


def _added(excess: Mapping[str, Mapping[int, float]], arm: str) -> float:
    """Percent that an arm adds to the exact exchange, as a mean over seeds that both have."""
    return statistics.fmean(excess[arm][seed] - exact for seed, exact in excess[_EXACT].items() if seed in excess[arm])


def _outers(exact: Iterable[Islands]) -> list[dict[str, Any]]:
    """The outer optimizer of the arms that exchange exactly, by their inner steps.

    Raises:
        UsageError: Two arms with as many inner steps have different ones.
    """
    by_every: dict[int, dict[str, Any]] = {}
    for islands in exact:
        outer = islands.outer.to_dict()
        if by_every.setdefault(islands.every, outer) != outer:
            raise UsageError(f"arms with every = {islands.every} have different outer optimizers; the law needs one")
    return [{"every": every, "optimizer": by_every[every]} for every in sorted(by_every)]


def _way(islands: Islands) -> dict[str, Any]:
    table = islands.to_dict()
    return {key: table[key] for key in _KEYS if key in table}
