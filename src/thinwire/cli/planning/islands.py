"""How ``thinwire plan --loss-budget`` shows plans with islands, and what it says about the law behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from thinwire.cli.planning.tables import Answer, row_json
from thinwire.report import Sheet

if TYPE_CHECKING:
    from thinwire.plan import IslandPlan, LossLaw, PricedPlan, TrainingJob
    from thinwire.spec import Plan


def add_islands(
    job: TrainingJob, plans: Sequence[IslandPlan], best: PricedPlan, law: LossLaw, budget: float, answer: Answer
) -> tuple[Plan, dict[str, Any]]:
    """Add plans with islands, what they change, and where their losses come from.

    Returns:
        The plan to write: the fastest with islands, if it gains more than a tie on the best one without, else that one.
        And what ``--json`` prints.
    """
    first = next(iter(plans), None)
    faster = first is not None and first.candidate.seconds * (1 + job.tie) < best.seconds
    columns = [
        "islands", "each", "every", "fragments", "delay", "exchange", "loss, by the fit", "step s", "of the first plan",
        "GiB",
    ]  # fmt: skip
    title = f"Plans with islands whose loss may end up to {budget:g}% higher"
    answer.show(Sheet(title, columns, 6, [_cells(plan, best, law) for plan in plans]))
    notes = _notes(job, plans, law, faster=faster)
    for sentence in notes:
        answer.show(sentence)
    rows = [
        {**row_json(job, number, plan.candidate), "way": plan.way.name, "loss_percent": plan.percent}
        for number, plan in enumerate(plans, start=1)
    ]
    facts = {"budget_percent": budget, "faster": faster, "plans": rows, "law": law.to_dict(), "notes": notes}
    return first.candidate.plan if first is not None and faster else best.plan, facts


def _notes(job: TrainingJob, plans: Sequence[IslandPlan], law: LossLaw, *, faster: bool) -> list[str]:
    """What a reader has to know before trusting the table."""
    made = [
        "Islands change what is trained: between two exchanges, each follows its own gradients. All other plans "
        "compute the same step.",
        f"The losses are a fit to a study with {law.parameters:,} parameters and {law.tokens:,} tokens, {law.trunk:,} "
        f"of them trained together first, on {law.of_islands} islands and every = {law.every[0]} "
        f"to {law.every[1]}; its error for a run it has not seen is {law.left_out:.2f}%, which the budget "
        f"includes. For your model of {job.model.parameters:,} parameters, this extrapolates: measure it.",
    ]
    if not plans:
        return [*made, "No plan with islands fits into memory."]
    if not faster:
        return [*made, "No plan with islands is faster than the first plan: do not use them here."]
    if plans[0].islands.elastic:
        made.append(
            "Each island is a job of its own. Steps and losses are those while all islands are there: the study has no "
            "absent ones. Start `thinwire lighthouse`, and each island with cluster.island and cluster.lighthouse."
        )
    if plans[0].islands.every == law.every[1]:
        made.append(f"The study ends at every = {law.every[1]}, so rarer exchanges are not tried.")
    return made


def _cells(plan: IslandPlan, best: PricedPlan, law: LossLaw) -> list[str]:
    islands, candidate = plan.islands, plan.candidate
    return [
        str(islands.count),
        str(candidate.plan.mesh),
        str(islands.every),
        str(islands.fragments),
        str(islands.delay),
        plan.way.name,
        f"{plan.percent:+.2f} ± {law.left_out:.2f}%",
        f"{candidate.seconds:.3f}",
        f"{candidate.seconds / best.seconds:.2f}",
        f"{candidate.memory.total / 2**30:.1f}",
    ]
