"""From the curves of a study to its answer: where each arm ends, and how far from the baseline."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.report import Sheet
from thinwire_bench.study.arms import LossGoal, StudySpec
from thinwire_bench.study.curves import Curve
from thinwire_bench.study.power import COLUMNS, CONFIDENCE, cells, compare


@dataclass(frozen=True)
class ArmOutcome:
    """The final loss of one arm.

    Attributes:
        arm: Name of the arm.
        about: Short description of the arm.
        losses: Final validation loss in nats per token, by seed; None where the run diverged.
        missing: Seeds whose runs have not finished.
        excess: By seed, how far the loss lies above the baseline's, in percent; only for seeds that both have finished.
    """

    arm: str
    about: str
    losses: Mapping[int, float | None]
    missing: Sequence[int]
    excess: Mapping[int, float]

    @property
    def mean(self) -> float | None:
        """Mean loss over finished seeds; None without any, or if one diverged."""
        losses = [loss for loss in self.losses.values() if loss is not None]
        return statistics.fmean(losses) if losses and len(losses) == len(self.losses) else None

    @property
    def spread(self) -> float | None:
        """Largest loss minus the smallest."""
        losses = [loss for loss in self.losses.values() if loss is not None]
        return max(losses) - min(losses) if self.mean is not None else None

    @property
    def mean_excess(self) -> float | None:
        """Mean of `excess`; None without any, or if a run diverged."""
        return statistics.fmean(self.excess.values()) if self.excess and self.mean is not None else None


@dataclass(frozen=True)
class Verdict:
    """Whether a goal is reached.

    Attributes:
        goal: Description of the goal.
        measured: Description of the measured value, or of the runs that are missing.
        reached: Whether the goal is reached; None where runs are missing.
    """

    goal: str
    measured: str
    reached: bool | None


def outcomes(spec: StudySpec, curves: Sequence[Curve]) -> list[ArmOutcome]:
    """The final loss of each arm.

    Args:
        spec: Specification of the study.
        curves: Curves of its finished runs.

    Returns:
        One for each arm, in the study's order.
    """
    ends = {(curve.arm, curve.seed): curve.final_loss for curve in curves}
    made = []
    for arm in spec.arms:
        losses = {seed: ends[arm.name, seed] for seed in spec.seeds if (arm.name, seed) in ends}
        excess = {
            seed: 100 * (loss / base - 1)
            for seed, loss in losses.items()
            if loss is not None and (base := ends.get((spec.baseline, seed))) is not None
        }
        missing = [seed for seed in spec.seeds if seed not in losses]
        made.append(ArmOutcome(arm.name, arm.about, losses, missing, excess))
    return made


def verdicts(spec: StudySpec, arm_outcomes: Sequence[ArmOutcome]) -> list[Verdict]:
    """Which goals are reached."""
    by_name = {outcome.arm: outcome for outcome in arm_outcomes}
    return [verdict for goal in spec.goals for verdict in _verdicts(goal, spec.baseline, by_name)]


def sheets(spec: StudySpec, arm_outcomes: Sequence[ArmOutcome]) -> list[Sheet]:
    """The answer as tables."""
    seeds = [f"seed {seed}" for seed in spec.seeds]
    columns = ["arm", "what travels", *seeds, "mean", "spread", f"over {spec.baseline}, mean", "smallest", "largest"]
    rows = [[outcome.arm, outcome.about, *_loss_cells(outcome, spec.seeds), *_excess_cells(outcome)]
            for outcome in arm_outcomes]  # fmt: skip
    faint = frozenset(index for index, outcome in enumerate(arm_outcomes) if outcome.arm == spec.baseline)
    made = [Sheet(f"Validation loss after {spec.tokens:,} tokens, nats per token", columns, 2, rows, faint)]
    states = {True: "reached", False: "missed", None: "open"}
    if comparisons := compare(_known_losses(arm_outcomes), spec.baseline):
        made.append(
            Sheet(
                f"Differences by seed, nats per token, with {CONFIDENCE:.0%} intervals", COLUMNS, 2, cells(comparisons)
            )
        )
    goals = [[verdict.goal, verdict.measured, states[verdict.reached]] for verdict in verdicts(spec, arm_outcomes)]
    return [*made, Sheet("Goals", ["goal", "measured", ""], 3, goals)] if goals else made


def _known_losses(arm_outcomes: Sequence[ArmOutcome]) -> dict[str, dict[int, float]]:
    """Final losses of arms of which no run diverged, by arm and seed."""
    return {
        outcome.arm: {seed: loss for seed, loss in outcome.losses.items() if loss is not None}
        for outcome in arm_outcomes
        if outcome.mean is not None
    }


def missing_note(arm_outcomes: Sequence[ArmOutcome]) -> str | None:
    """A sentence that names the runs that are not there; None where the study is complete."""
    lacking = [outcome for outcome in arm_outcomes if outcome.missing]
    total = sum(len(outcome.losses) + len(outcome.missing) for outcome in arm_outcomes)
    number = sum(len(outcome.missing) for outcome in lacking)
    return f"{number} of {total} runs are missing: {'; '.join(map(_lacks, lacking))}" if lacking else None


def _lacks(outcome: ArmOutcome) -> str:
    """The missing runs of an arm."""
    seeds = ", ".join(map(str, outcome.missing))
    if len(outcome.missing) == 1:
        return f"{outcome.arm} with seed {seeds}"
    return f"{outcome.arm} with seeds {seeds}" if outcome.losses else f"all of {outcome.arm}"


def plain(spec: StudySpec, arm_outcomes: Sequence[ArmOutcome]) -> dict[str, Any]:
    """The answer for programs."""
    return {
        "tokens": spec.tokens,
        "baseline": spec.baseline,
        "arms": [
            {**asdict(outcome), "mean": outcome.mean, "spread": outcome.spread, "mean_excess": outcome.mean_excess}
            for outcome in arm_outcomes
        ],
        "comparisons": [
            {
                "arm": one.arm,
                "less": one.other,
                "mean": one.mean,
                "half_width": one.half_width,
                "decided": one.decided,
                "seeds_needed": one.seeds_needed,
            }
            for one in compare(_known_losses(arm_outcomes), spec.baseline)
        ],
        "goals": [asdict(verdict) for verdict in verdicts(spec, arm_outcomes)],
        "missing": missing_note(arm_outcomes),
    }


def _verdicts(goal: LossGoal, baseline: str, by_name: Mapping[str, ArmOutcome]) -> list[Verdict]:
    arm, made = by_name[goal.arm], []
    if goal.within_percent is not None:
        words = f"{goal.arm} within {goal.within_percent:g} % of {baseline}"
        if arm.missing or by_name[baseline].missing:
            made.append(Verdict(words, "runs are missing", None))
        elif arm.mean_excess is None:
            made.append(Verdict(words, "diverged", False))
        else:
            made.append(Verdict(words, f"{arm.mean_excess:+.3f} %", arm.mean_excess <= goal.within_percent))
    if goal.better_than is not None:
        words, other = f"{goal.arm} better than {goal.better_than}", by_name[goal.better_than]
        if arm.missing or other.missing:
            made.append(Verdict(words, "runs are missing", None))
        elif arm.mean is None:
            made.append(Verdict(words, "diverged", False))
        elif other.mean is None:
            made.append(Verdict(words, f"{goal.better_than} diverged", True))
        else:
            made.append(Verdict(words, f"{arm.mean - other.mean:+.4f} nats per token", arm.mean < other.mean))
    return made


def _loss_cells(outcome: ArmOutcome, seeds: Sequence[int]) -> list[str]:
    cells = []
    for seed in seeds:
        loss = outcome.losses.get(seed)
        cells.append("missing" if seed in outcome.missing else "diverged" if loss is None else f"{loss:.4f}")
    return cells


def _excess_cells(outcome: ArmOutcome) -> list[str]:
    mean, spread, excess = outcome.mean, outcome.spread, outcome.mean_excess
    if mean is None or spread is None:
        return [""] * 5
    cells = [f"{mean:.4f}", f"{spread:.4f}"]
    if excess is None:
        return [*cells, "", "", ""]
    return [
        *cells,
        *(f"{value:+.2f} %" for value in (excess, min(outcome.excess.values()), max(outcome.excess.values()))),
    ]
