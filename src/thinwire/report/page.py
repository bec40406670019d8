"""One page about one or several runs that needs nothing else: no network, no script, no font, no file beside it."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from thinwire.record import RunRecord
from thinwire.report.charts import PALETTE, Chart, compared_charts, inline_svg, run_charts, timeline_chart, write_png
from thinwire.report.figures import differences, figures
from thinwire.report.sheet import Sheet
from thinwire.report.traced import read_step
from thinwire.units import format_bytes, format_duration

if TYPE_CHECKING:
    from thinwire.plan import RunComparison

__all__ = ["Subject", "final_sheet", "slug", "write_page"]

PAGE: Final = "index.html"
_HERE: Final = Path(__file__).parent


@dataclass(frozen=True)
class Subject:
    """A run with what else is known of it.

    Attributes:
        run: the run.
        comparison: with its prediction, if there is one.
        unpredicted: why there is none.
    """

    run: RunRecord
    comparison: RunComparison | None = None
    unpredicted: str = ""


def write_page(directory: Path, subjects: Sequence[Subject]) -> list[Path]:
    """Write ``index.html``, a PNG for every picture, and merged traces for Perfetto.

    Args:
        directory: where; made if need be.
        subjects: at least one.

    Returns:
        What was written, the page first.

    Raises:
        DataError: a trace of a run cannot be read.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    directory.mkdir(parents=True, exist_ok=True)
    written = [directory / PAGE]
    drawn = 0

    def shown(chart: Chart, owner: str) -> dict[str, Any]:
        nonlocal drawn
        drawn += 1
        png = directory / f"{owner}{chart.name}.png"
        write_png(chart, png)
        written.append(png)
        svg = inline_svg(chart, f"c{drawn}")
        return {"title": chart.title, "caption": chart.caption, "id": f"c{drawn}", "svg": svg, "wide": chart.wide}

    numbers = [figures(subject.run, subject.comparison) for subject in subjects]
    runs = [subject.run for subject in subjects]
    sections = []
    for subject, of_run in zip(subjects, numbers, strict=True):
        run = subject.run
        owner = f"{slug(run.name)}-" if len(subjects) > 1 else ""
        charts = run_charts(run, of_run, subject.comparison)
        trace = max(run.traces, key=lambda path: path.stat().st_size, default=None)
        if trace is not None:
            charts.append(timeline_chart(read_step(trace)))
            copy = directory / f"{owner}{trace.name}"
            copy.write_bytes(trace.read_bytes())
            written.append(copy)
        sections.append(
            {
                "anchor": slug(run.name),
                "run": run,
                "numbers": of_run,
                "facts": _facts(run, of_run),
                "tiles": _tiles(run, of_run),
                "charts": [shown(chart, owner) for chart in charts],
                "notes": _notes(subject, of_run, trace),
                "tables": [table for table in (_bytes_table(of_run), _prediction_table(subject.comparison)) if table],
                "files": [("Recipe", run.recipe.to_toml()), ("Plan", run.plan.to_toml())],
            }
        )
    several = len(subjects) > 1
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = environment.get_template("page.html.j2").render(
        title=", ".join(run.name for run in runs),
        written=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        light=[(name, colours[0]) for name, colours in PALETTE.items()],
        dark=[(name, colours[1]) for name, colours in PALETTE.items()],
        sections=sections,
        several=several,
        compared=[shown(chart, "") for chart in compared_charts(runs, numbers)] if several else [],
        final=final_sheet(numbers),
        differences=differences(runs) if several else [],
    )
    (directory / PAGE).write_text(text, encoding="utf-8")
    return written


def slug(name: str) -> str:
    """A run's name as a part of file names and of ids.

    Args:
        name: of the run.
    """
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "run"


def final_sheet(numbers: Sequence[Mapping[str, Any]]) -> Sheet:
    """Final figures, a row for each run.

    Args:
        numbers: of the runs.
    """
    columns = ["run", "status", "steps", "val loss", "train loss", "tokens/s", "step", "MFU", "exposed", "across nodes"]
    rows = [
        [
            of_run["name"],
            of_run["status"],
            f"{of_run['steps']:,}",
            _number(of_run["final_val_loss"], ".4f"),
            _number(of_run["final_train_loss"], ".4f"),
            _number(of_run["tokens_per_second"], ",.0f"),
            _duration(of_run["step_seconds"]),
            _percent(of_run["mfu"]),
            _percent(of_run["exposed_share"]),
            format_bytes(_across(of_run)),
            format_bytes(max(of_run["memory"].values(), default=0)),
        ]
        for of_run in numbers
    ]
    return Sheet("Final figures", [*columns, "memory"], 2, rows)


# -- words -----------------------------------------------------------------------------------------------------


def _facts(run: RunRecord, numbers: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The header: what was trained, how, where, by which command."""
    facts = [
        ("Plan", run.plan.describe()),
        ("Model", _model(run, numbers)),
        ("Data", _data(run)),
        ("Batch", _batch(run)),
        ("Place", _place(run)),
        ("Software", ", ".join(f"{name} {version}" for name, version in run.versions.items())),
        ("Directory", str(run.path)),
    ]
    return [(name, text) for name, text in facts if text]


def _model(run: RunRecord, numbers: Mapping[str, Any]) -> str:
    model = run.recipe.model
    sizes = {"layers": model.layers, "hidden": model.hidden, "heads": model.heads, "ffn": model.ffn}
    words = [model.preset or model.kind, *(f"{name} {size}" for name, size in sizes.items() if size is not None)]
    if model.path is not None:
        words.append(model.path)
    if numbers["parameters"]:
        words.append(f"{numbers['parameters']:,} parameters")
    return ", ".join(words)


def _data(run: RunRecord) -> str:
    data = run.recipe.data
    return ", ".join([data.source, *data.paths])


def _batch(run: RunRecord) -> str:
    plan, seq = run.plan, run.recipe.train.seq
    samples = plan.world * plan.micro_batch * plan.micro_batches
    return (
        f"{samples} sequences of {seq} tokens a step: {_counted(plan.world, 'data-parallel rank')}, "
        f"{_counted(plan.micro_batches, 'micro-batch', 'es')} of {plan.micro_batch}"
    )


def _counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number > 1 else ''}"


def _place(run: RunRecord) -> str:
    """Ranks, and what the newest start noted of the machine of rank 0."""
    start = run.starts[-1] if run.starts else {}
    return ", ".join(
        [_counted(run.plan.ranks, "rank"), *(str(start[key]) for key in ("device", "host") if start.get(key))]
    )


def _tiles(run: RunRecord, numbers: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name, figure, and what it means; figures that the run has not are left out."""
    world, across = run.plan.ranks, _across(numbers)
    best = f"best {numbers['best_val_loss']:.4f} at step {numbers['best_val_step']}" if numbers["best_val_step"] else ""
    tiles = [
        ("validation loss", _number(numbers["final_val_loss"], ".4f"), best),
        ("training loss", _number(numbers["final_train_loss"], ".4f"), f"after {numbers['steps']:,} steps"),
        ("throughput", _number(numbers["tokens_per_second"], ",.0f"), "tokens/s, median"),
        ("time of a step", _duration(numbers["step_seconds"]), "median"),
        ("MFU", _percent(numbers["mfu"]), "median"),
        ("exposed communication", _percent(numbers["exposed_share"]), "of a step"),
        ("across nodes", format_bytes(across / world), "per rank and step"),
        ("memory", format_bytes(max(numbers["memory"].values(), default=0)), "of the rank that uses most"),
        ("tokens", f"{numbers['tokens'] or 0:,}", "taken in all"),
    ]
    return [(name, value, note) for name, value, note in tiles if value != "-"] if run.records else []


def _notes(subject: Subject, numbers: Mapping[str, Any], trace: Path | None) -> list[str]:
    """What a reader should know that no picture shows, and why a picture is missing."""
    run = subject.run
    notes = []
    if run.failure is not None:
        notes.append(f"The run failed. {run.failure}")
    elif run.summary is None:
        notes.append(f"The run is not complete: it has logged step {run.last_step} of {run.recipe.train.steps}.")
    if not run.records:
        notes.append("No step was logged, so there is nothing to draw.")
    elif run.summary is not None and run.last_step < run.recipe.train.steps:
        notes.append(f"Its summary says that it is complete, but the last logged step is {run.last_step}.")
    notes += [_start_note(start) for start in run.starts[1:]]
    if run.unreadable:
        lines = _counted(run.unreadable, "line")
        notes.append(f"Left out: {lines} of metrics.jsonl that cannot be read, as a crash leaves them.")
    notes += [f"Step {record['step']}: {record['slow']}" for record in run.records if record.get("slow")][:10]
    if run.records and numbers["final_val_loss"] is None:
        notes.append("The run has not validated, so it has no validation loss.")
    if run.records and numbers["mfu"] is None:
        notes.append("MFU is unknown, as the device's peak is: set train.peak_tflops in the recipe to have it.")
    if subject.comparison is None:
        notes.append(f"No prediction: {subject.unpredicted}")
    if trace is None:
        notes.append("No timeline: no step was traced; train with --trace-steps FIRST:LAST to have one.")
    else:
        notes.append(f"The whole trace is in {trace.name} beside this page; https://ui.perfetto.dev shows it.")
    return notes


def _start_note(start: Mapping[str, Any]) -> str:
    when = datetime.datetime.fromtimestamp(float(start.get("time", 0)), datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"Started again after step {start.get('step', 0)} at {when} under {start.get('plan', 'an unknown plan')}."


def _bytes_table(numbers: Mapping[str, Any]) -> Sheet | None:
    rows = [
        [
            kind,
            format_bytes(hops["inside"]),
            format_bytes(hops["across"]),
            _duration(numbers["exposed_seconds"].get(kind)),
            _duration(numbers["codec_seconds"].get(kind)),
        ]
        for kind, hops in numbers["bytes_per_step"].items()
    ]
    columns = ["lane or axis", "inside nodes", "across nodes", "exposed", "codecs"]
    return Sheet("Communication of a step: bytes of all ranks, seconds of a rank", columns, 1, rows) if rows else None


def _prediction_table(comparison: RunComparison | None) -> Sheet | None:
    if comparison is None:
        return None
    shown = {"s": format_duration, "B": format_bytes}
    rows = [
        [q.name, shown[q.unit](q.predicted), shown[q.unit](q.measured), "-" if q.error is None else f"{q.error:+.1%}"]
        for q in comparison.quantities
    ]
    return Sheet("Predicted and measured", ["", "predicted", "measured", "error"], 1, rows)


def _across(numbers: Mapping[str, Any]) -> float:
    return float(sum(hops["across"] for hops in numbers["bytes_per_step"].values()))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)
