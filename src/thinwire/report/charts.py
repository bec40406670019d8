"""The pictures of a report: one figure, shown as SVG inside the page and kept as PNG beside it.

A page may be read on white or on black, so colours of an SVG are names that the page's style sheet defines; a PNG has
the light ones on white.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from thinwire.program.timeline import COMPUTE, WAITING
from thinwire.record import RunRecord, steady
from thinwire.report.figures import smoothed, thinned
from thinwire.units import format_bytes, format_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from thinwire.plan import RunComparison
    from thinwire.report.traced import TracedStep

__all__ = ["PALETTE", "Chart", "compared_charts", "inline_svg", "run_charts", "timeline_chart", "write_png"]

PALETTE: Final = {
    # Name in the style sheet: on white, on black.
    "ink": ("#24292f", "#d7dde4"),
    "line": ("#d5dae1", "#39424d"),
    "blue": ("#2563b8", "#6ea8fe"),
    "orange": ("#c2570c", "#f6a15b"),
    "green": ("#2f855a", "#68c79a"),
    "purple": ("#7c4fc4", "#b794f6"),
    "pink": ("#b83280", "#f48fb9"),
    "teal": ("#0e7c86", "#5cc8d0"),
    "brown": ("#8a5a2b", "#d0a679"),
    "grey": ("#6b7480", "#9aa4b0"),
}

_HUES: Final = ("blue", "orange", "green", "purple", "pink", "teal", "brown", "grey")
"""Of several runs, in their order; more runs begin again."""
_KIND_HUES: Final = {
    COMPUTE: "blue",
    WAITING: "grey",
    "gather": "green",
    "reduce": "orange",
    "sync": "purple",
    "spread": "pink",
    "control": "grey",
    "tp": "teal",
    "pp": "brown",
}
_MOST_RANKS: Final = 8
_MOST_BARS: Final = 3000
_BINS: Final = 120
_WIDE: Final = 11.0


@dataclass(frozen=True)
class Chart:
    """A picture with its words.

    Attributes:
        name: of the PNG file, without what it ends in.
        title: above it.
        caption: below it: what one sees, in which units.
        figure: the picture.
    """

    name: str
    title: str
    caption: str
    figure: Figure

    @property
    def wide(self) -> bool:
        """Whether it takes the whole width of a page."""
        return bool(self.figure.get_figwidth() == _WIDE)


def inline_svg(chart: Chart, prefix: str) -> str:
    """An ``<svg>`` element for a page that defines the palette as ``--ink``, ``--line`` and so on.

    Args:
        chart: the picture.
        prefix: makes ids differ from those of the page's other pictures; a letter first.
    """
    import matplotlib as mpl

    buffer = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        chart.figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    svg = text[text.index("<svg") :]
    for name, (light, _) in PALETTE.items():
        svg = svg.replace(light, f"var(--{name})")
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    # The page says how wide it is; the picture keeps its shape.
    svg = re.sub(r'^(<svg[^>]*?) (?:height|width)="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'^(<svg[^>]*?) (?:height|width)="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-labelledby="{prefix}-title"', 1).strip()


def write_png(chart: Chart, path: Path) -> None:
    """Write a picture on white. It is laid out for good by that.

    Args:
        chart: the picture.
        path: of the PNG.
    """
    chart.figure.savefig(path, dpi=130, facecolor="white")
    chart.figure.set_layout_engine("none")  # most of the time goes into the layout, and it would come out the same


def run_charts(run: RunRecord, numbers: Mapping[str, Any], comparison: RunComparison | None) -> list[Chart]:
    """What one run looks like.

    Args:
        run: the run.
        numbers: its figures.
        comparison: with its prediction, if there is one.
    """
    if not run.records:
        return []
    found = [_loss(run, numbers), _gradient(run), _throughput(run, numbers), _mfu(run, numbers), _anatomy(run, numbers)]
    found += [_bytes(numbers), _memory(run, numbers), _prediction(comparison)]
    return [chart for chart in found if chart is not None]


def timeline_chart(step: TracedStep) -> Chart:
    """What every rank did in a step.

    Args:
        step: of a merged trace.
    """
    ranks = list(step.by_rank)[:_MOST_RANKS]
    kinds = [k for k in _KIND_HUES if any(s.track.split()[0] == k for r in ranks for s in step.by_rank[r])]
    rows = [(rank, kind) for rank in ranks for kind in kinds]
    figure = _figure(height=0.8 + 0.17 * len(rows), width=_WIDE)
    axes = figure.add_subplot()
    budget = _MOST_BARS // max(1, len(ranks))
    for rank in ranks:
        by_track: dict[str, list[tuple[float, float]]] = {}
        for span in sorted(step.by_rank[rank], key=lambda span: span.start - span.end)[:budget]:
            by_track.setdefault(span.track, []).append((1e3 * span.start, 1e3 * (span.end - span.start)))
        for track, bars in by_track.items():
            kind = track.split()[0]
            place = (rows.index((rank, kind)) - 0.4, 0.8)
            axes.broken_barh(bars, place, facecolors=_light(_KIND_HUES[kind]), alpha=_strength(track))
    for number in range(1, len(ranks)):
        axes.axhline(number * len(kinds) - 0.5, color=_light("line"), linewidth=0.8)
    labels = [f"rank {rank}  {kind}" if kind == kinds[0] else kind for rank, kind in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=6.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1e3 * step.seconds)
    _dress(axes, "milliseconds since the step began on rank 0", "")
    axes.grid(visible=False, axis="y")
    more = (
        f" Ranks {ranks[0]} to {ranks[-1]} of {len(step.by_rank)} are shown." if len(step.by_rank) > len(ranks) else ""
    )
    caption = (
        f"{step.name.capitalize()}, {format_duration(step.seconds)} on rank 0: computation, the time it stood still "
        "(waiting), and the lanes on which communication ran beside it. Strong: across nodes; weaker: inside a node; "
        f"weakest: encoding and decoding. Clocks of ranks are aligned.{more}"
    )
    return Chart("timeline", "Timeline of a step", caption, figure)


def compared_charts(runs: Sequence[RunRecord], numbers: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Several runs in one picture each.

    Args:
        runs: with records or without.
        numbers: their figures.
    """
    pairs = [(run, of_run) for run, of_run in zip(runs, numbers, strict=True) if run.records]
    if not pairs:
        return []
    return [_losses([run for run, _ in pairs]), _speeds([run for run, _ in pairs]), _steps(pairs), _traffic(pairs)]


# -- one run ---------------------------------------------------------------------------------------------------


def _loss(run: RunRecord, numbers: Mapping[str, Any]) -> Chart | None:
    trained = _points(run, "loss")
    if not trained:
        return None
    figure = _figure()
    axes = figure.add_subplot()
    axes.plot(*_columns(thinned(trained)), color=_light("blue"), alpha=0.35, linewidth=0.8, label="training")
    smooth = list(zip([x for x, _ in trained], smoothed([y for _, y in trained]), strict=True))
    axes.plot(*_columns(thinned(smooth)), color=_light("blue"), linewidth=1.8, label="training, smoothed")
    validated = _points(run, "val_loss")
    if validated:
        axes.plot(*_columns(validated), "o-", color=_light("orange"), markersize=4, label="validation")
    entropy = numbers["unigram_entropy"]
    if entropy is not None:
        axes.axhline(entropy, color=_light("grey"), linestyle="--", linewidth=1, label="unigram entropy")
    _restarts(axes, run)
    _dress(axes, "step", "nats per token")
    _legend(axes)
    last = f"It ends at {trained[-1][1]:.3f}"
    last += f", validation at {validated[-1][1]:.3f}." if validated else "; the run has no validation yet."
    unigram = " Unigram entropy is what a model of token frequencies alone reaches." if entropy is not None else ""
    return Chart(
        "loss", "Loss", f"Cross entropy over steps, in nats per token, lower is better. {last}{unigram}", figure
    )


def _gradient(run: RunRecord) -> Chart | None:
    from matplotlib.ticker import LogFormatter

    norms, rates = _points(run, "grad_norm"), _points(run, "lr")
    if not norms:
        return None
    figure = _figure()
    axes = figure.add_subplot()
    axes.plot(*_columns(thinned(norms)), color=_light("purple"), linewidth=1.2, label="gradient norm (left)")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
    _dress(axes, "step", "gradient norm")
    axes.tick_params(which="minor", colors=_light("ink"), labelsize=7)
    right = axes.twinx()
    right.plot(*_columns(thinned(rates)), color=_light("teal"), linewidth=1.4, label="learning rate (right)")
    _dress(right, "step", "learning rate")
    right.grid(visible=False)
    lines = [*axes.get_lines(), *right.get_lines()]
    right.legend(lines, [str(line.get_label()) for line in lines], frameon=False, fontsize=8, labelcolor=_light("ink"))
    skipped = sum(bool(record.get("skipped")) for record in run.records)
    left_out = f" {skipped} updates were skipped, as their gradient was not finite." if skipped else ""
    caption = f"L2 norm of the whole gradient before clipping (logarithmic), and the learning rate.{left_out}"
    return Chart("gradient", "Gradient norm and learning rate", caption, figure)


def _throughput(run: RunRecord, numbers: Mapping[str, Any]) -> Chart | None:
    speeds, seq = _points(run, "tokens_per_second"), run.recipe.train.seq
    if not speeds:
        return None
    figure = _figure()
    axes = figure.add_subplot()
    axes.plot(*_columns(thinned(speeds)), color=_light("green"), linewidth=1.2)
    axes.axhline(numbers["tokens_per_second"], color=_light("grey"), linestyle="--", linewidth=1, label="median")
    axes.set_ylim(bottom=0)
    _restarts(axes, run)
    _dress(axes, "step", "tokens/s")
    _legend(axes)

    def to_samples(tokens: Any) -> Any:
        return tokens / seq

    def to_tokens(samples: Any) -> Any:
        return samples * seq

    right = axes.secondary_yaxis("right", functions=(to_samples, to_tokens))
    right.set_ylabel("samples/s", color=_light("ink"), fontsize=9)
    right.tick_params(colors=_light("ink"), labelsize=8)
    right.spines["right"].set_color(_light("line"))
    caption = (
        f"All ranks together, without validation and saving; a sample is a sequence of {seq} tokens. "
        f"The median is {numbers['tokens_per_second']:,.0f} tokens/s."
    )
    return Chart("throughput", "Throughput", caption, figure)


def _mfu(run: RunRecord, numbers: Mapping[str, Any]) -> Chart | None:
    points = [(step, 100 * share) for step, share in _points(run, "mfu")]
    if not points:
        return None
    figure = _figure()
    axes = figure.add_subplot()
    axes.plot(*_columns(thinned(points)), color=_light("teal"), linewidth=1.2)
    axes.set_ylim(bottom=0)
    _dress(axes, "step", "% of peak")
    caption = (
        "Model FLOP utilisation: what the model's arithmetic needs (attention not halved, recomputation not counted) "
        f"over what the devices could do. The median is {100 * numbers['mfu']:.2f} %."
    )
    return Chart("mfu", "Model FLOP utilisation", caption, figure)


def _anatomy(run: RunRecord, numbers: Mapping[str, Any]) -> Chart | None:
    rows = [(record, count) for record, count in steady(run) if record.get("step_seconds") is not None]
    if not rows:
        return None
    kinds = list(numbers["exposed_seconds"])
    columns = [
        [(r["step"], 1e3 * (r.get("exposed") or {}).get(kind, 0.0) / count) for r, count in rows] for kind in kinds
    ]
    waited = [sum(column[i][1] for column in columns) for i in range(len(rows))]
    rest = [(r["step"], max(0.0, 1e3 * r["step_seconds"] - waited[i])) for i, (r, _) in enumerate(rows)]
    figure = _figure()
    axes = figure.add_subplot()
    binned = [thinned(column, _BINS) for column in (rest, *columns)]
    hues = [_light("blue"), *(_light(_KIND_HUES.get(kind, "grey")) for kind in kinds)]
    labels = ["computation and the rest", *(f"waiting for {kind}" for kind in kinds)]
    xs = [x for x, _ in binned[0]]
    areas = axes.stackplot(xs, [[y for _, y in column] for column in binned], colors=hues, labels=labels, step="pre")
    areas[0].set_alpha(0.35)
    longest = sorted(sum(column[i][1] for column in binned) for i in range(len(xs)))
    top = 1.3 * longest[int(0.95 * (len(longest) - 1))]
    cut_off = sum(total > top for total in longest)
    axes.set_ylim(0, top or None)
    _dress(axes, "step", "ms of a step")
    _legend(axes)
    share = numbers["exposed_share"] or 0.0
    parts = ", ".join(f"{kind} {format_duration(seconds)}" for kind, seconds in numbers["exposed_seconds"].items())
    cut = [axis for axis in ("tp", "pp") if getattr(run.plan, axis) > 1 and axis not in kinds]
    uncounted = f" Exchanges of {' and '.join(cut)} are part of the rest." if cut else ""
    most = format_duration(longest[-1] / 1e3)
    beyond = f" {cut_off} of {len(xs)} bars reach beyond the picture, the highest to {most}." if cut_off else ""
    caption = (
        f"Where the time of a step goes, mean over ranks: computation waits for communication {100 * share:.1f} % of "
        f"it ({parts or 'nothing'}); what is not seen here is hidden behind computation.{uncounted}{beyond}"
    )
    return Chart("exposed", "Exposed communication", caption, figure)


def _bytes(numbers: Mapping[str, Any]) -> Chart | None:
    sent = numbers["bytes_per_step"]
    if not sent:
        return None
    figure = _figure(height=1.1 + 0.42 * len(sent))
    axes = figure.add_subplot()
    scale, unit = _byte_scale(max(sum(hops.values()) for hops in sent.values()))
    inside = [hops["inside"] / scale for hops in sent.values()]
    across = [hops["across"] / scale for hops in sent.values()]
    rows = range(len(sent))
    axes.barh(rows, inside, color=_light("blue"), alpha=0.45, label="inside nodes", height=0.6)
    axes.barh(rows, across, left=inside, color=_light("orange"), label="across nodes", height=0.6)
    axes.set_yticks(rows, list(sent))
    axes.set_ylim(len(sent) - 0.5, -0.5)
    _dress(axes, f"{unit} of a step, all ranks", "")
    axes.grid(visible=False, axis="y")
    _legend(axes)
    total = format_bytes(sum(hops["across"] for hops in sent.values()))
    caption = (
        f"Encoded bytes that all ranks send in a step, by lane (tp and pp: by axis) and hop; {total} cross nodes. "
        "The table below has every figure."
    )
    return Chart("bytes", "Bytes by hop and lane", caption, figure)


def _memory(run: RunRecord, numbers: Mapping[str, Any]) -> Chart | None:
    over_time = {
        kind: [(r["step"], (r.get("memory") or {})[kind]) for r in run.records if kind in (r.get("memory") or {})]
        for kind in numbers["memory"]
    }
    if not over_time:
        return None
    by_rank = numbers["memory_by_rank"]
    figure = _figure()
    left, right = figure.subplots(1, 2, sharey=True) if by_rank else (figure.add_subplot(), None)
    scale, unit = _byte_scale(max(numbers["memory"].values()))
    for kind, points in over_time.items():
        hue = _light("blue" if kind == "rss" else "green")
        left.plot(*_columns(thinned([(x, y / scale) for x, y in points])), color=hue, label=_MEMORY.get(kind, kind))
    left.set_ylim(bottom=0)
    _dress(left, "step", unit)
    _legend(left)
    if right is not None:
        width = 0.8 / len(by_rank)
        for number, (kind, amounts) in enumerate(by_rank.items()):
            places = [rank + (number - (len(by_rank) - 1) / 2) * width for rank in range(len(amounts))]
            hue = _light("blue" if kind == "rss" else "green")
            right.bar(places, [amount / scale for amount in amounts], width, color=hue, alpha=0.75)
        _dress(right, "rank", "")
        right.xaxis.get_major_locator().set_params(integer=True)
        right.grid(visible=False, axis="x")
    told = ", ".join(f"{_MEMORY.get(kind, kind)} {format_bytes(most)}" for kind, most in numbers["memory"].items())
    if by_rank:
        what = "Left: the rank that uses most, over steps. Right: the most that each rank was seen to use."
    else:
        what = "The rank that uses most, over steps; the run has no figures by rank."
    caption = f"{what} At most: {told}."
    return Chart("memory", "Memory by rank", caption, figure)


def _prediction(comparison: RunComparison | None) -> Chart | None:
    known = [q for q in comparison.quantities if q.error is not None] if comparison is not None else []
    if not known:
        return None
    figure = _figure(height=1.0 + 0.3 * len(known))
    axes = figure.add_subplot()
    errors = [100 * (q.error or 0.0) for q in known]
    rows = range(len(known))
    axes.barh(rows, errors, color=[_light("orange" if error > 0 else "blue") for error in errors], height=0.55)
    axes.axvline(0, color=_light("ink"), linewidth=0.8)
    axes.set_yticks(rows, [q.name for q in known])
    axes.set_ylim(len(known) - 0.5, -0.5)
    _dress(axes, "predicted over measured, % too much (right) or too little (left)", "")
    axes.grid(visible=False, axis="y")
    assert comparison is not None
    caption = (
        f"What the simulator says of this plan on this profile against the median of {comparison.steps} steps. Waiting "
        "and bytes are of a rank and step."
    )
    return Chart("prediction", "Predicted against measured", caption, figure)


# -- several runs ----------------------------------------------------------------------------------------------


def _losses(runs: Sequence[RunRecord]) -> Chart:
    figure = _figure(width=_WIDE, height=3.6)
    left, right = figure.subplots(1, 2)
    across = _common_axis(runs)
    for run, hue in zip(runs, itertools.cycle(_HUES), strict=False):
        trained = _points(run, "loss", across)
        smooth = list(zip([x for x, _ in trained], smoothed([y for _, y in trained]), strict=True))
        if trained:
            left.plot(*_columns(thinned(smooth)), color=_light(hue), linewidth=1.5, label=run.name)
        validated = _points(run, "val_loss", across)
        if validated:
            right.plot(*_columns(validated), "o-", color=_light(hue), markersize=4, linewidth=1.3, label=run.name)
    _dress(left, across, "training, smoothed, nats per token")
    _dress(right, across, "validation, nats per token")
    for axes in (left, right):
        _legend(axes)
    why = " Runs take different numbers of tokens a step, so tokens are the common axis." if across == "tokens" else ""
    return Chart("compared-loss", "Loss", f"Left: training loss, smoothed. Right: validation loss.{why}", figure)


def _speeds(runs: Sequence[RunRecord]) -> Chart:
    figure = _figure(width=_WIDE, height=3.0)
    axes = figure.add_subplot()
    across = _common_axis(runs)
    for run, hue in zip(runs, itertools.cycle(_HUES), strict=False):
        points = _points(run, "tokens_per_second", across)
        if points:
            axes.plot(*_columns(thinned(points)), color=_light(hue), linewidth=1.2, label=run.name)
    axes.set_ylim(bottom=0)
    _dress(axes, across, "tokens/s")
    _legend(axes)
    return Chart("compared-throughput", "Throughput", "Tokens per second of all ranks, without validation.", figure)


def _steps(pairs: Sequence[tuple[RunRecord, Mapping[str, Any]]]) -> Chart:
    def parts(numbers: Mapping[str, Any]) -> dict[str, float]:
        exposed = {kind: 1e3 * seconds for kind, seconds in numbers["exposed_seconds"].items()}
        rest = max(0.0, 1e3 * (numbers["step_seconds"] or 0.0) - sum(exposed.values()))
        return {"computation and the rest": rest, **{f"waiting for {kind}": ms for kind, ms in exposed.items()}}

    figure = _stacked([run.name for run, _ in pairs], [parts(numbers) for _, numbers in pairs], "ms of a step, median")
    caption = "Time of a step: computation and the rest, and what computation waits for, mean over ranks."
    return Chart("compared-step", "Time of a step", caption, figure)


def _traffic(pairs: Sequence[tuple[RunRecord, Mapping[str, Any]]]) -> Chart:
    across = [
        {kind: hops["across"] for kind, hops in numbers["bytes_per_step"].items() if hops["across"]}
        for _, numbers in pairs
    ]
    scale, unit = _byte_scale(max([sum(kinds.values()) for kinds in across], default=0.0))
    scaled = [{kind: amount / scale for kind, amount in kinds.items()} for kinds in across]
    figure = _stacked([run.name for run, _ in pairs], scaled, f"{unit} of a step across nodes, all ranks")
    caption = "Encoded bytes that cross nodes in a step, by lane (tp and pp: by axis)."
    return Chart("compared-bytes", "Bytes across nodes", caption, figure)


def _stacked(names: Sequence[str], tables: Sequence[Mapping[str, float]], unit: str) -> Figure:
    figure = _figure(height=1.2 + 0.42 * len(names), width=_WIDE)
    axes = figure.add_subplot()
    begun = [0.0] * len(names)
    for part in dict.fromkeys(part for table in tables for part in table):
        widths = [table.get(part, 0.0) for table in tables]
        hue = _KIND_HUES.get(part.removeprefix("waiting for "), "blue")
        alpha = 0.35 if part.startswith("computation") else 1.0
        axes.barh(range(len(names)), widths, left=begun, height=0.6, color=_light(hue), alpha=alpha, label=part)
        begun = [start + width for start, width in zip(begun, widths, strict=True)]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    _dress(axes, unit, "")
    axes.grid(visible=False, axis="y")
    _legend(axes)
    return figure


# -- how it is drawn -------------------------------------------------------------------------------------------

_MEMORY: Final = {"rss": "resident memory of the process", "cuda": "peak memory of the GPU"}


def _figure(width: float = 6.4, height: float = 3.0) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _dress(axes: Axes, x_name: str, y_name: str) -> None:
    ink, line = _light("ink"), _light("line")
    axes.set_xlabel(x_name, color=ink, fontsize=9)
    axes.set_ylabel(y_name, color=ink, fontsize=9)
    axes.tick_params(colors=ink, labelsize=8, length=3)
    for place, spine in axes.spines.items():
        spine.set_color(line)
        spine.set_visible(place in ("left", "bottom"))
    axes.grid(visible=True, color=line, linewidth=0.6)
    axes.set_axisbelow(True)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, labelcolor=_light("ink"))


def _restarts(axes: Axes, run: RunRecord) -> None:
    for start in run.starts:
        if start.get("step"):
            axes.axvline(start["step"], color=_light("grey"), linestyle=":", linewidth=1)


def _light(name: str) -> str:
    return PALETTE[name][0]


def _strength(track: str) -> float:
    if track in (COMPUTE, WAITING):
        return 0.85
    return 1.0 if "across" in track else 0.6 if "inside" in track else 0.35


def _points(run: RunRecord, key: str, across: str = "step") -> list[tuple[float, float]]:
    return [
        (float(record[across]), float(record[key]))
        for record in run.records
        if record.get(key) is not None and record.get(across) is not None
    ]


def _common_axis(runs: Sequence[RunRecord]) -> str:
    """Steps where all runs take the same tokens a step, else tokens."""
    sizes = {run.records[-1].get("tokens", 0) / max(1, run.last_step) for run in runs}
    return "step" if len(sizes) == 1 else "tokens"


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _byte_scale(most: float) -> tuple[float, str]:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if most >= size:
            return float(size), unit
    return 1.0, "bytes"
