"""One page about one or several runs. It is self-contained: it loads no script, no font and no other file."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from thinwire.errors import DataError
from thinwire.record import RunRecord
from thinwire.report.charts import read_step, run_charts, timeline_chart
from thinwire.report.compared import compared_charts
from thinwire.report.drawing import PALETTE, Chart, inline_svg, write_png
from thinwire.report.figures import differences, figures
from thinwire.report.sheet import Sheet, prediction_sheet
from thinwire.spec.plan import Plan
from thinwire.units import format_bytes, format_duration

if TYPE_CHECKING:
    from thinwire.plan import Culprit, RunComparison

PAGE: Final = "index.html"
_HERE: Final = Path(__file__).parent


@dataclass(frozen=True)
class Subject:
    """A run and its comparison with a prediction.

    Attributes:
        run: The run.
        comparison: The run compared with its prediction; None where there is no prediction.
        unpredicted: Why there is no prediction.
        culprit: The part of a step that was most wrong; None if all is as expected, or nothing was expected.
    """

    run: RunRecord
    comparison: RunComparison | None = None
    unpredicted: str = ""
    culprit: Culprit | None = None


def write_page(directory: Path, subjects: Sequence[Subject]) -> list[Path]:
    """Write ``index.html``, a PNG for every picture, and merged traces for Perfetto; returns the files, the page first.

    Raises:
        DataError: a trace of a run cannot be read.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    directory.mkdir(parents=True, exist_ok=True)
    pictures = _Pictures(directory)
    numbers = [figures(subject.run, subject.comparison) for subject in subjects]
    runs = [subject.run for subject in subjects]
    several = len(subjects) > 1
    sections = [
        _section(subject, of_run, pictures, owner=f"{slug(subject.run.name)}-" if several else "")
        for subject, of_run in zip(subjects, numbers, strict=True)
    ]
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
        compared=[pictures.add(chart, "") for chart in compared_charts(runs, numbers)] if several else [],
        final=final_sheet(numbers),
        differences=differences(runs) if several else [],
    )
    (directory / PAGE).write_text(text, encoding="utf-8", errors="backslashreplace")  # of a path that is not UTF-8
    return [directory / PAGE, *pictures.written]


class _Pictures:
    """The pictures of a page, and the other files in its directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._drawn = 0
        self.written: list[Path] = []

    def add(self, chart: Chart, owner: str) -> dict[str, Any]:
        """Write a picture as PNG; returns what the template of the page shows."""
        self._drawn += 1
        path = self._directory / f"{owner}{chart.name}.png"
        write_png(chart, path)
        self.written.append(path)
        number = f"c{self._drawn}"
        svg = inline_svg(chart, number)
        return {"title": chart.title, "caption": chart.caption, "id": number, "svg": svg, "wide": chart.wide}

    def copy(self, path: Path, owner: str) -> None:
        """Copy a file; ``owner`` is the prefix of the copy's name."""
        copy = self._directory / f"{owner}{path.name}"
        copy.write_bytes(path.read_bytes())
        self.written.append(copy)


def _section(subject: Subject, numbers: Mapping[str, Any], pictures: _Pictures, owner: str) -> dict[str, Any]:
    """What the template shows of one run; ``owner`` is the prefix of the names of its files."""
    run = subject.run
    charts = run_charts(run, numbers, subject.comparison)
    predicted = subject.comparison and prediction_sheet(subject.comparison, "Predicted and measured")
    trace = max(run.traces, key=lambda path: path.stat().st_size, default=None)
    if trace is not None:
        charts.append(timeline_chart(read_step(trace)))
        pictures.copy(trace, owner)
    return {
        "anchor": slug(run.name),
        "run": run,
        "numbers": numbers,
        "facts": _facts(run, numbers),
        "tiles": _tiles(run, numbers),
        "charts": [pictures.add(chart, owner) for chart in charts],
        "notes": _notes(subject, numbers, trace),
        "tables": [table for table in (_bytes_table(numbers), predicted, _race_table(run)) if table],
        "files": [("Recipe", run.recipe.to_toml()), ("Plan", run.plan.to_toml())],
    }


def slug(name: str) -> str:
    """A run's name as it stands in names of files and in ids."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "run"


def final_sheet(numbers: Sequence[Mapping[str, Any]]) -> Sheet:
    """Final figures, a row for each run."""
    rows = [[run["name"], run["status"], f"{run['steps']:,}", *_shown(run).values()] for run in numbers]
    columns = ["val loss", "train loss", "tokens/s", "step", "MFU", "exposed", "across nodes", "memory"]
    return Sheet("Final figures", ["run", "status", "steps", *columns], 2, rows)


def _shown(numbers: Mapping[str, Any]) -> dict[str, str]:
    """The final figures of a run as text, by column."""
    return {
        "val loss": _number(numbers["final_val_loss"], ".4f"),
        "train loss": _number(numbers["final_train_loss"], ".4f"),
        "tokens/s": _number(numbers["tokens_per_second"], ",.0f"),
        "step": _duration(numbers["step_seconds"]),
        "MFU": _percent(numbers["mfu"]),
        "exposed": _percent(numbers["exposed_share"]),
        "across nodes": format_bytes(_across(numbers)),
        "memory": format_bytes(max(numbers["memory"].values(), default=0)),
    }


# -- words -----------------------------------------------------------------------------------------------------


def _facts(run: RunRecord, numbers: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The header: model, plan, data, batch, machine and software."""
    facts = [
        ("Plan", run.plan.describe()),
        ("Model", _model(run, numbers)),
        ("Data", ", ".join([run.recipe.data.source, *run.recipe.data.paths])),
        ("Batch", _batch(run)),
        ("Place", _place(run)),
        ("Software", ", ".join(f"{name} {version}" for name, version in run.versions.items())),
        ("Directory", str(run.path)),
    ]
    return [(name, text) for name, text in facts if text]


def _model(run: RunRecord, numbers: Mapping[str, Any]) -> str:
    model = run.recipe.model
    sizes = {"layers": model.layers, "hidden": model.hidden, "heads": model.heads, "ffn": model.ffn}
    words = [model.preset or model.family, *(f"{name} {size}" for name, size in sizes.items() if size is not None)]
    if model.path is not None:
        words.append(model.path)
    if numbers["parameters"]:
        words.append(f"{numbers['parameters']:,} parameters")
    return ", ".join(words)


def _batch(run: RunRecord) -> str:
    plan, seq = run.plan, run.recipe.train.seq
    return (
        f"{plan.global_batch} sequences of {seq} tokens a step: {_counted(plan.data_ranks, 'data-parallel rank')}, "
        f"{_counted(plan.micro_batches, 'micro-batch', 'es')} of {plan.micro_batch}"
    )


def _counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number > 1 else ''}"


def _place(run: RunRecord) -> str:
    """The number of ranks, and the device and host of rank 0 at the newest start."""
    start = run.starts[-1] if run.starts else {}
    return ", ".join(
        [_counted(run.plan.ranks, "rank"), *(str(start[key]) for key in ("device", "host") if start.get(key))]
    )


def _tiles(run: RunRecord, numbers: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name, figure and meaning of each tile; a figure that the run lacks is left out."""
    shown, across = _shown(numbers), _across(numbers) / run.plan.ranks
    best = f"best {numbers['best_val_loss']:.4f} at step {numbers['best_val_step']}" if numbers["best_val_step"] else ""
    tiles = [
        ("validation loss", shown["val loss"], best),
        ("training loss", shown["train loss"], f"after {numbers['steps']:,} steps"),
        ("throughput", shown["tokens/s"], "tokens/s, mean"),
        ("time of a step", shown["step"], "mean"),
        ("MFU", shown["MFU"], "mean"),
        ("exposed communication", shown["exposed"], "of a step"),
        ("across nodes", format_bytes(across), "per rank and step"),
        ("memory", shown["memory"], "of the rank that uses most"),
        ("tokens", f"{numbers['tokens'] or 0:,}", "taken in all"),
    ]
    return [(name, value, note) for name, value, note in tiles if value != "-"] if run.records else []


def _notes(subject: Subject, numbers: Mapping[str, Any], trace: Path | None) -> list[str]:
    """What no picture shows, and why a picture is missing."""
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
    notes += [_order_note(start) for start in run.starts[-1:] if start.get("hosts")]
    if run.unreadable:
        lines = _counted(run.unreadable, "line")
        notes.append(f"Left out: {lines} of metrics.jsonl that cannot be read, as a crash leaves them.")
    said = ("slow", "slow_link", "allocator")
    sentences = [(record["step"], record.get(key)) for record in run.records for key in said]
    notes += [f"Step {step}: {sentence}" for step, sentence in sentences if sentence][:10]
    if run.records and numbers["final_val_loss"] is None:
        notes.append("The run has not validated, so it has no validation loss.")
    if run.records and numbers["mfu"] is None:
        notes.append("MFU is unknown, as the device's peak is: set train.peak_tflops in the recipe to have it.")
    if subject.culprit is not None:
        notes.append(f"{subject.culprit.sentence[:1].upper()}{subject.culprit.sentence[1:]}.")
        notes.append(f"To measure it again: {subject.culprit.command}")
    if subject.comparison is None:
        notes.append(f"No prediction: {subject.unpredicted}")
    if trace is None:
        notes.append("No timeline: no step was traced; train with --set train.trace_steps=FIRST:LAST to have one.")
    else:
        notes.append(f"{trace.name}, next to this page, holds the whole trace; https://ui.perfetto.dev shows it.")
    return notes


def _start_note(start: Mapping[str, Any]) -> str:
    try:
        when = datetime.datetime.fromtimestamp(float(start["time"]), datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (KeyError, TypeError, OverflowError, OSError, ValueError):  # no number of seconds since 1970 in a calendar
        when = "an unknown time"
    return f"Started again after step {start.get('step', 0)} at {when} under {start.get('plan', 'an unknown plan')}."


def _order_note(start: Mapping[str, Any]) -> str:
    order = str(start.get("order", ""))
    return f"{order[:1].upper()}{order[1:]}. Hosts in the order of the mesh: {' '.join(map(str, start['hosts']))}."


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


def _race_table(run: RunRecord) -> Sheet | None:
    """The plans that ``--plan auto`` tried before the run."""
    if run.race is None:
        return None
    try:
        rows = [
            [
                "preset " + raced["label"] if raced["label"] else Plan.parse(raced["plan"]).describe(),
                format_duration(raced["predicted"]),
                _duration(raced["measured"]),
                raced["problem"] or ("taken" if raced["taken"] else ""),
            ]
            for raced in run.race["plans"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{run.path / 'race.json'} does not say which plans were tried: {error!r}") from error
    return Sheet("Plans that were tried before the run", ["plan", "predicted", "measured", ""], 1, rows)


def _across(numbers: Mapping[str, Any]) -> float:
    return float(sum(hops["across"] for hops in numbers["bytes_per_step"].values()))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)
