"""How ``thinwire plan --explain`` shows the optimum by AMSP's sum beside the optimum by predicted step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

from thinwire.cli.plan_tables import row_json

if TYPE_CHECKING:
    from thinwire.plan import BothObjectives, TrainingJob, UnderBoth

_GIB = 2**30


def show_objectives(both: BothObjectives, console: Console) -> None:
    """Print both plans under both objectives, and the terms in which they differ."""
    from thinwire.report import Sheet, rich_table

    columns = [
        "least", "P", "G", "OS", "batch", "T_p s", "T_g s", "T_os0 s", "T_os1 s", "recompute s", "sum s",
        "transfers s", "waiting s", "step s", "GiB, as AMSP counts", "GiB",
    ]  # fmt: skip
    cells = [_cells(name, row) for name, row in both.rows.items()]
    if cells:
        console.print(rich_table(Sheet("Both objectives, without codecs", columns, 5, cells)))
    for sentence in both.differences:
        console.print(sentence, markup=False)


def objectives_json(job: TrainingJob, both: BothObjectives | None) -> dict[str, Any] | None:
    """Both plans under both objectives as JSON."""
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


def _cells(name: str, row: UnderBoth) -> list[str]:
    plan, step = row.plan, row.step
    terms = (*row.summed.terms.values(), row.summed.objective)
    times = (*terms, row.transferring, row.waiting, step.seconds)
    return [
        name,
        str(plan.params),
        str(plan.grads),
        str(plan.optimizer),
        f"{plan.micro_batch} x {plan.micro_batches}{' recompute' if plan.recompute else ''}",
        *(f"{seconds:.3f}" for seconds in times),
        f"{row.summed.memory.total / _GIB:.1f}",
        f"{step.memory.total / _GIB:.1f}",
    ]
