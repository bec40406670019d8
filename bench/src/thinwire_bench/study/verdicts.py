"""From the results of a convergence study to its sheet: what it could decide, what it has decided, and what not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from thinwire.report import Sheet
from thinwire_bench.study.convergence import Outcome, Study
from thinwire_bench.study.power import POWER, half_width, least_margin, power, seeds_needed

CONFIDENCE: Final = 0.95
"""Probability that all intervals of a study hold at once, by Bonferroni's inequality."""


@dataclass(frozen=True)
class Verdict:
    """What is known of one arm.

    Attributes:
        arm: The arm.
        baseline: Its baseline.
        differences: Its loss over the baseline's, in percent, by seed.
        diverged: Seeds with which it diverged and its baseline did not.
        low: Lower end of the interval of the mean difference; ``None`` with fewer than two pairs.
        high: Upper end.
        decision: ``"less"`` or ``"more"`` than the margin, ``"diverges"``, or ``"undecided"``.
        power: Probability with which the study's seeds decide on an arm that costs nothing, at the spread that was
            measured, or assumed as long as none is.
        margin: Smallest margin that the study's seeds decide, at that spread, in percent.
        seeds: Seeds that would decide at that spread; ``None`` for more than 10,000.
    """

    arm: str
    baseline: str
    differences: Mapping[int, float]
    diverged: Sequence[int]
    low: float | None
    high: float | None
    decision: str
    power: float
    margin: float
    seeds: int | None

    @property
    def spread(self) -> float | None:
        """Standard deviation of the differences; ``None`` with fewer than two pairs."""
        return statistics.stdev(self.differences.values()) if len(self.differences) > 1 else None


def verdicts(study: Study, outcomes: Sequence[Outcome]) -> list[Verdict]:
    """What is known of every arm by the results that are there."""
    losses = _losses(outcomes)
    return [_verdict(study, arm.name, arm.baseline, losses) for arm in study.arms if arm.baseline is not None]


def _losses(outcomes: Sequence[Outcome]) -> dict[tuple[str, int], float | None]:
    """Losses by arm and seed; ``None`` for a run that diverged."""
    return {(outcome.arm, outcome.seed): outcome.loss for outcome in outcomes}


def _tail(study: Study) -> float:
    """Probability of a miss on one side of one interval."""
    return (1 - CONFIDENCE) / len(study.spec.arms) / 2


def _verdict(study: Study, arm: str, baseline: str, losses: Mapping[tuple[str, int], float | None]) -> Verdict:
    differences, diverged, tail = {}, [], _tail(study)
    for seed in range(study.spec.seeds):
        own, base = losses.get((arm, seed), math.nan), losses.get((baseline, seed))
        if base is None or (own is not None and math.isnan(own)):
            continue
        if own is None:
            diverged.append(seed)
        else:
            differences[seed] = 100 * (own / base - 1)
    found = list(differences.values())
    spread, margin, seeds = study.spec.spread, study.spec.margin, study.spec.seeds
    low = high = None
    if len(found) > 1:
        spread, half = statistics.stdev(found), half_width(found, tail)
        low, high = statistics.fmean(found) - half, statistics.fmean(found) + half
    return Verdict(
        arm, baseline, differences, diverged, low, high, _decision(diverged, low, high, margin),
        power(margin, spread, seeds, tail), least_margin(spread, seeds, tail), seeds_needed(margin, spread, tail),
    )  # fmt: skip


def _decision(diverged: Sequence[int], low: float | None, high: float | None, margin: float) -> str:
    if diverged:
        return "diverges"
    if low is None or high is None:
        return "undecided"
    return "less" if high < margin else "more" if low > margin else "undecided"


def words(study: Study, outcomes: Sequence[Outcome]) -> list[str]:
    """The answer in sentences: what is decided, what is not, and what is missing."""
    made = verdicts(study, outcomes)
    margin = f"{study.spec.margin:g} %"
    said = [
        f"Raises the loss by {decision} than {margin}: {', '.join(arms)}."
        for decision in ("less", "more")
        if (arms := [verdict.arm for verdict in made if verdict.decision == decision])
    ]
    if diverges := [verdict.arm for verdict in made if verdict.decision == "diverges"]:
        said.append(f"Diverges where its baseline does not: {', '.join(diverges)}.")
    if undecided := [f"{v.arm} ({_many(v.seeds)})" for v in made if v.decision == "undecided"]:
        said.append(
            f"Undecided, with the seeds that would decide on an arm that costs nothing: {', '.join(undecided)}."
        )
    if missing := len(study.runs) - len(outcomes):
        said.append(
            f"{missing} of {len(study.runs)} runs are missing. The decisions hold once all runs are made: to stop when "
            "they please costs confidence."
        )
    return said


def sheets(study: Study, outcomes: Sequence[Outcome]) -> list[Sheet]:
    """The answer as tables: what could be decided before, what is decided now, and every loss."""
    spec, tail, made = study.spec, _tail(study), verdicts(study, outcomes)
    before = [
        f"{spec.seeds}", f"{study.tokens:,}", f"{spec.margin:g} %", f"{spec.spread:g} %",
        f"{power(spec.margin, spec.spread, spec.seeds, tail):.0%}",
        f"{least_margin(spec.spread, spec.seeds, tail):.2g} %", _many(seeds_needed(spec.margin, spec.spread, tail)),
    ]  # fmt: skip
    of_power = ["power", f"decided at {POWER:.0%}", f"seeds for {POWER:.0%}"]
    power_columns = ["seeds", "tokens a run", "matters from", "spread, assumed", *of_power]
    columns = ["arm", "against", "decision", "pairs", "mean", "interval", "spread", *of_power]
    named = {"less": f"less than {spec.margin:g} %", "more": f"more than {spec.margin:g} %"}
    rows = [
        [
            v.arm, v.baseline, named.get(v.decision, v.decision), str(len(v.differences)),
            f"{statistics.fmean(v.differences.values()):+.3f} %" if v.differences else "",
            "" if v.low is None else f"{v.low:+.3f} to {v.high:+.3f} %",
            "" if v.spread is None else f"{v.spread:.3f} %", f"{v.power:.0%}", f"{v.margin:.2g} %",
            _many(v.seeds) if v.decision == "undecided" else "",
        ]
        for v in made
    ]  # fmt: skip
    seeds = range(spec.seeds)
    shown = {key: "diverged" if loss is None else f"{loss:.4f}" for key, loss in _losses(outcomes).items()}
    of_arms = [[arm.name, *(shown.get((arm.name, seed), "missing") for seed in seeds)] for arm in study.arms]
    faint = frozenset(index for index, arm in enumerate(study.arms) if arm.baseline is None)
    title = f"Differences of the validation loss, in percent of the baseline's; all intervals at {CONFIDENCE:.0%}"
    return [
        Sheet("Before: what the study can decide", power_columns, 0, [before]),
        Sheet(title, columns, 3, rows),
        Sheet("Validation loss, nats per token", ["arm", *(f"seed {seed}" for seed in seeds)], 1, of_arms, faint),
    ]


def _many(seeds: int | None) -> str:
    return "over 10,000" if seeds is None else f"{seeds:,}"


def plain(study: Study, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The answer for programs."""
    return {
        "study": study.spec.to_dict(),
        "recipe": study.recipe.to_dict(),
        "plans": {arm.name: arm.plan.to_dict() for arm in study.arms},
        "tokens": study.tokens,
        "verdicts": [{**asdict(verdict), "spread": verdict.spread} for verdict in verdicts(study, outcomes)],
        "answer": words(study, outcomes),
        "runs": [asdict(outcome) for outcome in outcomes],
    }
