"""Tables that compare the planner's predictions with measured steps, and its choices with the fastest plans."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.report import Sheet
from thinwire.units import format_bytes


@dataclass(frozen=True)
class Pair:
    """One plan on one link, predicted and measured.

    Attributes:
        model: Name of the model.
        bandwidth: Bandwidth of the links, as the user wrote it.
        cap: Bytes that a rank may use; ``None`` sets no limit.
        plan: Preset, or the link for which the planner chose the plan.
        factors: Description of the plan.
        local_ms: Milliseconds per step of the same ranks without communication, in the same rounds.
        pace: Factor by which the ranks computed slower than when the profile was measured.
        predicted_ms: Predicted milliseconds per step, at that pace.
        measured_ms: Measured milliseconds per step, median over rounds.
        spread_ms: Milliseconds per step between the slowest and the fastest round.
        predicted_bytes: Predicted memory of a rank, in bytes.
        measured_bytes: Peak resident memory of any rank, in bytes, in steps in which it gives back what it frees.
        held_bytes: Peak resident memory of any rank, in bytes, with what its allocator kept for later, until the end of
            all rounds.
    """

    model: str
    bandwidth: str
    cap: int | None
    plan: str
    factors: str
    local_ms: float
    pace: float
    predicted_ms: float
    measured_ms: float
    spread_ms: float
    predicted_bytes: int
    measured_bytes: int
    held_bytes: int

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_ms / self.measured_ms - 1


@dataclass(frozen=True)
class Choice:
    """The planner's choice on one link and the plans that were fastest in the first rounds, all measured again.

    Attributes:
        model: Name of the model.
        bandwidth: Bandwidth of the links, as the user wrote it.
        cap: Bytes that a rank may use; ``None`` sets no limit.
        plan: The plan that was chosen.
        best: The fastest plan, which may be the choice itself.
        ratio: The choice's step over that of the fastest plan, median of the ratios within rounds.
        memory: Peak resident memory of any rank under the chosen plan, in bytes, as :attr:`Pair.measured_bytes`.
        raced: The plan that a race would choose: the fastest, in the first rounds, of the choice, of plans that the
            prediction cannot tell from it, and of presets; ``None`` in results from before races.
        raced_ratio: The same as ``ratio`` for that plan.
    """

    model: str
    bandwidth: str
    cap: int | None
    plan: str
    best: str
    ratio: float
    memory: int
    raced: str | None = None
    raced_ratio: float | None = None


@dataclass(frozen=True)
class ChangedChoice:
    """A choice that the planner would make differently now, with descriptions of the plan that was measured and of the
    plan that it chooses now."""

    choice: Choice
    measured: str
    now: str


def sheets(pairs: Sequence[Pair], choices: Sequence[Choice], changed: Sequence[ChangedChoice] = ()) -> list[Sheet]:
    """Every pair, where errors are, every choice, choices that have changed since, and what the goals ask: mean error
    of time and memory, and how good choices are."""
    columns = [
        "model", "memory cap", "link", "plan", "pace", "predicted ms", "measured ms", "spread", "error", "memory MiB",
        "measured", "error", "held",
    ]  # fmt: skip
    cells = [
        [
            pair.model, _limit(pair.cap), pair.bandwidth, pair.plan, f"{pair.pace:.2f}", f"{pair.predicted_ms:.1f}",
            f"{pair.measured_ms:.1f}", f"{pair.spread_ms:.1f}", f"{pair.error:+.1%}",
            f"{pair.predicted_bytes / 2**20:.0f}", f"{pair.measured_bytes / 2**20:.0f}",
            f"{pair.predicted_bytes / pair.measured_bytes - 1:+.1%}", f"{pair.held_bytes / 2**20:.0f}",
        ]
        for pair in pairs
    ]  # fmt: skip
    where = ["model", "memory cap", "link"]

    def at(choice: Choice, *figures: str) -> list[str]:
        return [choice.model, _limit(choice.cap), choice.bandwidth, *figures]

    chosen = [at(choice, choice.plan, choice.best, f"{choice.ratio:.3f}") for choice in choices]
    raced = [at(each, each.raced, each.best, f"{each.raced_ratio:.3f}") for each in choices if each.raced is not None]
    tables = [
        Sheet("Predicted and measured", columns, 4, cells),
        _by_link(pairs),
        Sheet("Choices", [*where, "chosen", "fastest", "chosen / fastest"], 5, chosen),
    ]
    if raced:
        tables.append(Sheet("Choices after a race", [*where, "taken", "fastest", "taken / fastest"], 5, raced))
    if changed:
        rows = [at(each.choice, each.measured, each.now) for each in changed]
        title = "Choices that the planner makes differently now, not measured"
        tables.append(Sheet(title, [*where, "measured", "chosen now"], 5, rows))
    return [*tables, Sheet("Goals", ["", "measured", "goal", ""], 1, _goals(pairs, choices))]


def _by_link(pairs: Sequence[Pair]) -> Sheet:
    """The errors of predictions by model and link, with their direction."""
    links = list(dict.fromkeys(pair.bandwidth for pair in pairs))
    models = list(dict.fromkeys(pair.model for pair in pairs))

    def cell(chosen: Sequence[Pair]) -> str:
        if not chosen:
            return ""
        absolute = statistics.fmean(abs(pair.error) for pair in chosen)
        return f"{absolute:.1%} ({statistics.fmean(pair.error for pair in chosen):+.1%})"

    def row(name: str, chosen: Sequence[Pair]) -> list[str]:
        return [name, *(cell([pair for pair in chosen if pair.bandwidth == link]) for link in links), cell(chosen)]

    rows = [row(model, [pair for pair in pairs if pair.model == model]) for model in models]
    columns = ["mean error of step time (with its sign)", *links, "all links"]
    return Sheet("Predicted and measured, by model and link", columns, 1, [*rows, row("all models", pairs)])


def _limit(cap: int | None) -> str:
    return "" if cap is None else format_bytes(cap)


def _goals(pairs: Sequence[Pair], choices: Sequence[Choice]) -> list[list[str]]:
    def row(name: str, measured: float, goal: float, form: str) -> list[str]:
        return [name, format(measured, form), format(goal, form), "reached" if measured <= goal else "missed"]

    error = statistics.fmean(abs(pair.error) for pair in pairs)
    # Memory is measured once for all links: what counts is the link on which most was needed.
    peaks: dict[tuple[str, int | None, str], tuple[int, int]] = {}
    for pair in pairs:
        key = pair.model, pair.cap, pair.plan
        predicted, measured = peaks.get(key, (0, 0))
        peaks[key] = max(predicted, pair.predicted_bytes), max(measured, pair.measured_bytes)
    memory = statistics.fmean(abs(predicted / measured - 1) for predicted, measured in peaks.values())
    ratios = [choice.ratio for choice in choices]
    raced = [choice.raced_ratio for choice in choices if choice.raced_ratio is not None]
    rows = [
        row(f"step time, mean error over {len(pairs)} pairs", error, 0.05, ".1%"),
        row(f"peak memory, mean error over {len(peaks)} plans", memory, 0.02, ".1%"),
        row(f"choice over the fastest, mean of {len(ratios)}", statistics.fmean(ratios), 1.03, ".3f"),
        row("choice over the fastest, worst", max(ratios), 1.03, ".3f"),
    ]
    if raced:
        rows.append(row("choice after a race over the fastest, worst", max(raced), 1.03, ".3f"))
    kept = [choice.memory / choice.cap for choice in choices if choice.cap is not None]
    return [*rows, row("memory of choices over their cap, worst", max(kept), 1.0, ".3f")] if kept else rows
