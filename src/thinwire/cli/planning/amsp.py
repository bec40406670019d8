"""``thinwire plan --objective amsp``: plans by AMSP's sum of communication, and that optimum beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.planning.tables import Answer, File, factors_and_batch, introduce, row_json
from thinwire.report import Sheet

if TYPE_CHECKING:
    from thinwire.plan import AmspPlan, BothObjectives, TrainingJob, UnderBoth

_GIB = 2**30


def least_sum(job: TrainingJob, top: int, out: Path | None, answer: Answer, *, explain: bool) -> None:
    """Add the plans of the least sum, the paper's among them."""
    import thinwire.plan as planner

    plans = planner.amsp_search(job, top=top)
    rows = {number: row for number, row in enumerate(plans, start=1) if number <= top or row.label}
    introduce(job, answer)
    columns = ["", "P", "G", "OS", "batch", "T_p s", "T_g s", "T_os0 s", "T_os1 s", "recompute s", "sum s", "GiB", ""]
    cells = [_cells(number, row) for number, row in rows.items()]
    answer.show(Sheet("Plans by AMSP's objective: communication in sequence, whole tensors", columns, 5, cells))
    flips: list[str] = []
    both = None
    if explain:
        both = planner.both_objectives(job)
        show_objectives(both, answer)
        flips = planner.amsp_flips(job)
        answer.show("when the paper's plan (amsp-paper) is the optimum:")
        for flip in flips or ["under nothing that was tried"]:
            answer.show(f"  {flip}")
    if out is not None and plans and plans[0].fits:
        answer.files.append(File("--out", out, plans[0].plan.save, f"wrote the first plan to {out}"))
    answer.facts = {
        "plans": [
            {
                **row_json(job, number, planner.price_plan(job, row.plan, row.label)),
                "objective_seconds": row.objective,
                "times": {
                    "params": row.times.params,
                    "grads": row.times.grads,
                    "sync": row.times.sync,
                    "spread": row.times.spread,
                    "recompute": row.recomputing,
                },
                "memory_bytes": {**row.memory.by_part(), "total": row.memory.total},
                "fits": row.fits,
            }
            for number, row in rows.items()
        ],
        "explain": {"amsp_paper_is_chosen_with": flips, "objectives": objectives_json(job, both)},
    }


def _cells(number: int, row: AmspPlan) -> list[str]:
    times = row.times
    return [
        f"{number} {row.label or ''}".strip(),
        *factors_and_batch(row.plan),
        *(f"{seconds:.3f}" for seconds in (times.params, times.grads, times.sync, times.spread, row.recomputing)),
        f"{row.objective:.3f}",
        f"{row.memory.total / _GIB:.1f}",
        "" if row.fits else "does not fit",
    ]


# -- both objectives -----------------------------------------------------------------------------------------------


def show_objectives(both: BothObjectives, answer: Answer) -> None:
    """Add both plans under both objectives, and the terms in which they differ."""
    columns = [
        "least", "P", "G", "OS", "batch", "T_p s", "T_g s", "T_os0 s", "T_os1 s", "recompute s", "sum s",
        "transfers s", "waiting s", "step s", "GiB, as AMSP counts", "GiB",
    ]  # fmt: skip
    cells = [_cells_of_both(name, row) for name, row in both.rows.items()]
    if cells:
        answer.show(Sheet("Both objectives, without codecs", columns, 5, cells))
    for sentence in both.differences:
        answer.show(sentence)


def objectives_json(job: TrainingJob, both: BothObjectives | None) -> dict[str, Any] | None:
    if both is None:
        return None
    plans = {
        name: {
            **row_json(job, 1, row.step),
            "transfer_seconds": row.transferring,
            "sum_seconds": {**row.summed.terms, "sum": row.summed.objective},
            "reducing_seconds": row.reducing,
            "amsp_memory_bytes": row.summed.memory.total,
            "fp32_gradients_memory_bytes": row.in_fp32,
        }
        for name, row in both.rows.items()
    }
    return {"by_sum": plans.get("sum"), "by_step": plans.get("step"), "differences": list(both.differences)}


def _cells_of_both(name: str, row: UnderBoth) -> list[str]:
    times = (*row.summed.terms.values(), row.summed.objective, row.transferring, row.waiting, row.step.seconds)
    return [
        name,
        *factors_and_batch(row.plan),
        *(f"{seconds:.3f}" for seconds in times),
        f"{row.summed.memory.total / _GIB:.1f}",
        f"{row.step.memory.total / _GIB:.1f}",
    ]
