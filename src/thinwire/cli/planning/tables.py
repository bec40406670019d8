"""How ``thinwire plan`` shows plans: a table, sentences, and rows of JSON, in an answer with the files that options ask
for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.terminal.errors import writing
from thinwire.report import Sheet, print_sheet
from thinwire.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from thinwire.plan import Explanation, PricedPlan, Searched, TrainingJob
    from thinwire.spec import Plan


@dataclass(frozen=True)
class File:
    """A file that an option asks for, and what is said once it is written, unless the answer says it."""

    option: str
    path: Path
    write: Callable[[Path], object]
    done: str | None = None


@dataclass
class Answer:
    """What a search has found: sentences and tables, the same as JSON, and files to be written."""

    shown: list[str | Sheet] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    files: list[File] = field(default_factory=list)

    def show(self, part: str | Sheet) -> None:
        """Add a sentence or a table."""
        self.shown.append(part)

    @property
    def fits(self) -> bool:
        """Whether there is a plan that fits."""
        return bool(self.facts.get("best") or any(row["fits"] for row in self.facts["plans"]))


def give(answer: Answer, console: Console, *, as_json: bool) -> None:
    """Print an answer, on stdout as JSON too if ``as_json``, and write its files."""
    for part in answer.shown:
        if isinstance(part, Sheet):
            print_sheet(console, part)
        else:
            console.print(part)
    for file in answer.files:
        with writing(file.option, file.path):
            file.write(file.path)
        if file.done is not None:
            console.print(file.done)
    if as_json:
        print(json.dumps(answer.facts))


def listed(searched: Searched, top: int) -> list[PricedPlan]:
    """The chosen plan, then the best plans and classic systems by time, then the classic systems that do not fit."""
    first, rest = list(searched.candidates[:1]), list(searched.candidates[1:top])
    others = sorted([*rest, *(c for c in searched.classics if c.fits)], key=lambda c: c.seconds)
    return [*first, *others, *(c for c in searched.classics if not c.fits)]


def introduce(job: TrainingJob, answer: Answer) -> None:
    """Add the model, the cluster, and what the times are based on."""
    from thinwire.cost import NominalRates

    cluster, model = job.cluster, job.model
    active = "" if model.experts is None else f" ({model.active_parameters / 1e9:.2f} billion of them active)"
    answer.show(
        f"{model.name or 'model'}: {model.parameters / 1e9:.2f} billion parameters{active}, "
        f"{job.seq:,} tokens a sequence, {job.tokens_per_step:,} a step; {cluster.name or 'cluster'}: "
        f"{cluster.gpus:,} GPUs of {format_bytes(cluster.memory)}",
    )
    if job.margin:
        answer.show(
            f"plans leave {1 - job.room / cluster.memory:.1%} of the memory free: by the profile, ranks may need up to "
            f"{job.margin:.1%} more than predicted",
        )
    if isinstance(job.rates, NominalRates):
        kernels = " and from times of kernels" if job.rates.has_kernels else ""
        answer.show(f"times follow from published figures{kernels}, not from a profile of this cluster")
    if job.compute_dtype == "float16":
        answer.show(
            "the accelerator has a peak for float16 and none for bfloat16: plans compute in float16, with loss scaling",
        )
    if job.codecs == "lossless" and not job.rates.on_processors:
        answer.show(
            "mpc and exp3 are left out on GPUs: the host would wait for the length of each message, and nothing would "
            "hide it; a plan of your own may name them",
        )


_UNNAMED = {"rank": "", "fits": ""}
"""Columns whose cells need no heading."""


def plan_sheet(job: TrainingJob, rows: Sequence[PricedPlan]) -> Sheet:
    cells = [_cells(job, number, row) for number, row in enumerate(rows, start=1)]
    columns = [name for name in cells[0] if any(row[name] for row in cells)]
    return Sheet(
        "Plans, best first (MFU: attention counted in full)",
        [_UNNAMED.get(name, name) for name in columns],
        columns.index("step s"),
        [[row[name] for name in columns] for row in cells],
    )


def _cells(job: TrainingJob, number: int, row: PricedPlan) -> dict[str, str]:
    """The cells of a plan by column; a column without any is not shown."""
    chosen, price = row.plan, job.cluster.price_per_gpu_hour
    cut = f"{chosen.tp} x {chosen.pp}{' interleaved' if chosen.pipeline_schedule == 'interleaved' else ''}"
    host = f" + {row.memory.host / 2**30:.1f} host" if row.memory.host else ""
    waiting = sum(row.simulated.exposed.values()) + sum(astuple(row.axes))
    params, grads, optimizer, batch = factors_and_batch(chosen)
    return {
        "rank": f"{number} {row.label or ''}".strip(),
        "tp x pp": cut if chosen.ranks > chosen.data_ranks else "",
        "P": params,
        "G": grads,
        "OS": optimizer,
        "codecs": _codecs(row),
        "batch": batch,
        "step s": f"{row.seconds:.3f}",
        "waiting s": f"{waiting:.3f}",
        "MFU": f"{row.mfu(job):.1%}",
        "TGS": f"{row.tokens_per_gpu_second(job):,.0f}",
        "GiB": f"{row.memory.total / 2**30:.1f}{host}",
        "per 10^9 tokens": "" if price is None else f"{row.cost_per_billion_tokens(job):,.0f}",
        "fits": "" if row.fits else "does not fit",
    }


def factors_and_batch(plan: Plan) -> tuple[str, str, str, str]:
    """The cells ``P``, ``G``, ``OS`` and ``batch`` of a plan."""
    batch = f"{plan.micro_batch} x {plan.micro_batches}{' recompute' if plan.recompute else ''}"
    return str(plan.params), str(plan.grads), str(plan.optimizer), batch


def _codecs(row: PricedPlan) -> str:
    """The secondary copy of a plan and its codecs, in words."""
    secondary = {} if row.plan.secondary is None else {"secondary": row.plan.secondary}
    short = {"gather": "gather", "reduce_intra": "inside", "reduce_inter": "across", "scatter": "scatter"}
    short |= {"spread": "spread", "tp": "tp", "pp": "pp"}
    codecs = row.plan.wire.codecs()
    used = {name: codecs[key] for key, name in short.items() if key in codecs and not codecs[key].is_none}
    return " ".join(f"{name} {value}" for name, value in {**secondary, **used}.items()) or "-"


def search_line(searched: Searched, tie: float) -> str:
    """The number of plans that were searched, and by how much any of them can be better than the first."""
    sure = f"no other choice of factors, codecs and batch is faster by more than {searched.gap:.1%}"
    if not searched.complete:
        sure += " (raise --top to simulate more)"
    cuts = f" with {searched.cuts} ways of tensor and pipeline parallelism" if searched.cuts > 1 else ""
    quick = " and do not lose by what they compute alone" if searched.cuts > 1 else ""
    return (
        f"{searched.considered:,} plans{cuts}, of which {searched.fitting:,} fit{quick}; "
        f"{searched.simulated} simulated: {sure}. Ties within {tie:.0%} go to the plan with fewer knobs."
    )


def show_explanation(explanation: Explanation, chosen: PricedPlan, answer: Answer) -> None:
    """Add what bounds the chosen plan, and what would change the choice."""
    answer.show(f"\nbound by {explanation.binding}")
    for cause, seconds in explanation.path.items():
        answer.show(f"  {seconds:8.3f} s  {seconds / chosen.seconds:6.1%}  {cause}")
    if explanation.noise:
        low, high = explanation.noise
        answer.show(f"with the quartiles of the profile: {low:.3f} to {high:.3f} s")
    if explanation.runner_up:
        answer.show(f"runner-up: {explanation.runner_up}")
    for flip in explanation.flips:
        after = "" if flip.seconds is None else f" ({flip.seconds:.3f} s)"
        answer.show(f"with {flip.change}: {flip.plan}{after}")
    if explanation.steady:
        answer.show(f"the same plan with {'; '.join(explanation.steady)}")


def row_json(job: TrainingJob, number: int, row: PricedPlan) -> dict[str, Any]:
    from thinwire.plan import provenance

    basis = provenance(job, row)
    return {
        "rank": number,
        "plan": row.plan.to_dict(),
        "step_seconds": row.seconds,
        "tgs": row.tokens_per_gpu_second(job),
        "mfu": row.mfu(job),
        "exposed_seconds": {str(lane): seconds for lane, seconds in row.simulated.exposed.items()},
        "axis_seconds": {
            "tp": row.axes.sums,
            "pp": row.axes.messages,
            "idle": row.axes.idle,
            "ep": row.axes.experts,
            "cp": row.axes.context,
        },
        "memory_bytes": {**row.memory.by_part(), "total": row.memory.total},
        **({"host_bytes": row.memory.host} if row.memory.host else {}),
        "fits": row.fits,
        "label": row.label,
        "cost_per_billion_tokens": row.cost_per_billion_tokens(job),
        "extrapolated": basis.step == "extrapolated",
        "basis": {"step": basis.step, "computation": basis.computation, "transfers": basis.transfers},
    }


def explanation_json(explanation: Explanation) -> dict[str, Any]:
    return {
        "binding": explanation.binding,
        "critical_path": explanation.path,
        "noise_seconds": explanation.noise,
        "runner_up": explanation.runner_up,
        "flips": [{"change": f.change, "plan": f.plan, "step_seconds": f.seconds} for f in explanation.flips],
        "steady": list(explanation.steady),
    }
