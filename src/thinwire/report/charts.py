"""The pictures of one run: loss, speed, communication, memory, prediction, and the timeline of a step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from thinwire.errors import DataError
from thinwire.program.timeline import STEP, Span
from thinwire.record import RunRecord, of_plan, steady
from thinwire.report.drawing import (
    KIND_HUES,
    WIDE,
    Chart,
    add_legend,
    byte_scale,
    columns_of,
    dress,
    dress_rows,
    light,
    mark_restarts,
    new_axes,
    new_figure,
    points_of,
    strength,
)
from thinwire.report.figures import smoothed, thinned
from thinwire.units import format_bytes, format_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from thinwire.plan import RunComparison

_MOST_RANKS: Final = 8
"""Ranks that a timeline shows."""
_MOST_BARS: Final = 3000
"""Bars of a timeline, the longest ones."""
_BINS: Final = 120
"""Bars of a picture over steps."""
_MEMORY: Final = {
    "rss": ("resident memory of the process", "blue"),
    "cuda": ("peak memory of the GPU", "green"),
    "reserved": ("held by its allocator", "orange"),
    "pieces": ("idle in pieces", "pink"),
}
"""Kinds of memory: label and colour."""


def run_charts(run: RunRecord, numbers: Mapping[str, Any], comparison: RunComparison | None) -> list[Chart]:
    """The pictures of one run that it has data for."""
    if not run.records:
        return []
    charts = [loss_chart(run), _gradient(run), _throughput(run, numbers), _mfu(run, numbers), _anatomy(run, numbers)]
    charts += [_bytes(numbers), _memory(run, numbers), _prediction(comparison)]
    return [chart for chart in charts if chart is not None]


@dataclass(frozen=True)
class TracedStep:
    """What every rank did in one step: its seconds on rank 0, and spans of computation, waiting and lanes by rank, from
    its beginning on."""

    name: str
    seconds: float
    by_rank: Mapping[int, Sequence[Span]]


def read_step(path: Path) -> TracedStep:
    """The step in the middle of a trace, which shows what those before it left behind.

    Raises:
        DataError: it is none.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        spans = _spans(events)
        steps = sorted((span for span in spans[min(spans)] if span.track == STEP), key=lambda span: span.start)
        chosen = steps[len(steps) // 2]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, IndexError) as error:
        raise DataError(
            f"{path} cannot be read as the trace of a step ({error!r}); trace again, or remove it"
        ) from error
    by_rank = {rank: _within(of_rank, chosen) for rank, of_rank in sorted(spans.items())}
    return TracedStep(chosen.name, chosen.end - chosen.start, by_rank)


def _spans(events: Sequence[Mapping[str, Any]]) -> dict[int, list[Span]]:
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name" and e["ph"] == "M"}
    found: dict[int, list[Span]] = {}
    for event in events:
        if event["ph"] == "X":
            start, seconds = event["ts"] / 1e6, event["dur"] / 1e6
            span = Span(tracks[event["pid"], event["tid"]], event["name"], start, start + seconds)
            found.setdefault(event["pid"], []).append(span)
    return found


def _within(spans: Sequence[Span], step: Span) -> list[Span]:
    """Spans that overlap a step, cut to it; torch's own operations are for Perfetto."""
    return [
        Span(
            span.track,
            span.name,
            max(span.start, step.start) - step.start,
            min(span.end, step.end) - step.start,
        )
        for span in spans
        if span.end > step.start and span.start < step.end and span.track != STEP and not span.track.startswith("torch")
    ]


def timeline_chart(step: TracedStep) -> Chart:
    """What every rank did in a step."""
    ranks = list(step.by_rank)[:_MOST_RANKS]
    traced = {span.track.split()[0] for rank in ranks for span in step.by_rank[rank]}
    kinds = [kind for kind in KIND_HUES if kind in traced]
    rows = [(rank, kind) for rank in ranks for kind in kinds]
    figure, axes = new_axes(height=0.8 + 0.17 * len(rows), width=WIDE)
    budget = _MOST_BARS // max(1, len(ranks))
    for rank in ranks:
        longest = sorted(step.by_rank[rank], key=lambda span: span.start - span.end)[:budget]
        _draw_spans(axes, longest, {kind: rows.index((rank, kind)) for kind in kinds})
    for number in range(1, len(ranks)):
        axes.axhline(number * len(kinds) - 0.5, color=light("line"), linewidth=0.8)
    labels = [f"rank {rank}  {kind}" if kind == kinds[0] else kind for rank, kind in rows]
    axes.set_xlim(0, 1e3 * step.seconds)
    dress_rows(axes, "milliseconds since the step began on rank 0", labels, fontsize=6.5)
    more = ""
    if len(step.by_rank) > len(ranks):
        more = f" Ranks {ranks[0]} to {ranks[-1]} of {len(step.by_rank)} are shown."
    caption = (
        f"{step.name.capitalize()}, {format_duration(step.seconds)} on rank 0: computation, the time it stood still "
        "(waiting), and the lanes of communication that overlapped it. Strong: across nodes; weaker: inside a node; "
        f"weakest: encoding and decoding. Clocks of ranks are aligned.{more}"
    )
    return Chart("timeline", "Timeline of a step", caption, figure)


def _draw_spans(axes: Axes, spans: Sequence[Span], row_of: Mapping[str, int]) -> None:
    by_track: dict[str, list[tuple[float, float]]] = {}
    for span in spans:
        by_track.setdefault(span.track, []).append((1e3 * span.start, 1e3 * (span.end - span.start)))
    for track, bars in by_track.items():
        kind = track.split()[0]
        axes.broken_barh(bars, (row_of[kind] - 0.4, 0.8), facecolors=light(KIND_HUES[kind]), alpha=strength(track))


def loss_chart(run: RunRecord) -> Chart | None:
    """Training and validation loss, with the unigram entropy for comparison; ``None`` if no step was logged."""
    trained = points_of(run, "loss")
    if not trained:
        return None
    figure, axes = new_axes()
    axes.plot(*columns_of(thinned(trained)), color=light("blue"), alpha=0.35, linewidth=0.8, label="training")
    axes.plot(*columns_of(thinned(smoothed(trained))), color=light("blue"), linewidth=1.8, label="training, smoothed")
    validated = points_of(run, "val_loss")
    if validated:
        axes.plot(*columns_of(validated), "o-", color=light("orange"), markersize=4, label="validation")
    entropy = (run.summary or {}).get("unigram_entropy")
    if entropy is not None:
        axes.axhline(entropy, color=light("grey"), linestyle="--", linewidth=1, label="unigram entropy")
    mark_restarts(axes, run)
    dress(axes, "step", "nats per token")
    add_legend(axes)
    last = f"It ends at {trained[-1][1]:.3f}"
    last += f", validation at {validated[-1][1]:.3f}." if validated else "; the run has no validation yet."
    unigram = " Unigram entropy is what a model of token frequencies alone reaches." if entropy is not None else ""
    return Chart(
        "loss", "Loss", f"Cross entropy over steps, in nats per token, lower is better. {last}{unigram}", figure
    )


def _gradient(run: RunRecord) -> Chart | None:
    from matplotlib.ticker import LogFormatter

    norms, rates = points_of(run, "grad_norm"), points_of(run, "lr")
    if not norms:
        return None
    figure, axes = new_axes()
    axes.plot(*columns_of(thinned(norms)), color=light("purple"), linewidth=1.2, label="gradient norm (left)")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
    dress(axes, "step", "gradient norm")
    axes.tick_params(which="minor", colors=light("ink"), labelsize=7)
    right = axes.twinx()
    right.plot(*columns_of(thinned(rates)), color=light("teal"), linewidth=1.4, label="learning rate (right)")
    dress(right, "step", "learning rate")
    right.grid(visible=False)
    lines = [*axes.get_lines(), *right.get_lines()]
    right.legend(lines, [str(line.get_label()) for line in lines], frameon=False, fontsize=8, labelcolor=light("ink"))
    skipped, scales = run.skipped_steps, [record.get("loss_scale") for record in run.records]
    left_out = f" {skipped} updates were skipped, as their gradient was not finite." if skipped else ""
    known = [scale for scale in scales if scale is not None]
    scaled = f" The loss scale lay between {min(known):g} and {max(known):g}." if known else ""
    caption = f"L2 norm of the whole gradient before clipping (logarithmic), and the learning rate.{left_out}{scaled}"
    return Chart("gradient", "Gradient norm and learning rate", caption, figure)


def _throughput(run: RunRecord, numbers: Mapping[str, Any]) -> Chart | None:
    speeds, seq = points_of(run, "tokens_per_second"), run.recipe.train.seq
    if not speeds or numbers["tokens_per_second"] is None:
        return None
    figure, axes = new_axes()
    axes.plot(*columns_of(thinned(speeds)), color=light("green"), linewidth=1.2)
    axes.axhline(numbers["tokens_per_second"], color=light("grey"), linestyle="--", linewidth=1, label="mean")
    axes.set_ylim(bottom=0)
    mark_restarts(axes, run)
    dress(axes, "step", "tokens/s")
    add_legend(axes)

    def to_samples(tokens: Any) -> Any:
        return tokens / seq

    def to_tokens(samples: Any) -> Any:
        return samples * seq

    right = axes.secondary_yaxis("right", functions=(to_samples, to_tokens))
    right.set_ylabel("samples/s", color=light("ink"), fontsize=9)
    right.tick_params(colors=light("ink"), labelsize=8)
    right.spines["right"].set_color(light("line"))
    caption = (
        f"All ranks together, without validation and saving; a sample is a sequence of {seq} tokens. "
        f"The mean is {numbers['tokens_per_second']:,.0f} tokens/s."
    )
    return Chart("throughput", "Throughput", caption, figure)


def _mfu(run: RunRecord, numbers: Mapping[str, Any]) -> Chart | None:
    points = [(step, 100 * share) for step, share in points_of(run, "mfu")]
    if not points or numbers["mfu"] is None:
        return None
    figure, axes = new_axes()
    axes.plot(*columns_of(thinned(points)), color=light("teal"), linewidth=1.2)
    axes.set_ylim(bottom=0)
    dress(axes, "step", "% of peak")
    caption = (
        "Model FLOP utilisation: what the model's arithmetic needs (attention not halved, recomputation not counted) "
        f"over what the devices could do. The mean is {100 * numbers['mfu']:.2f} %."
    )
    return Chart("mfu", "Model FLOP utilisation", caption, figure)


def _anatomy(run: RunRecord, numbers: Mapping[str, Any]) -> Chart | None:
    kinds = list(numbers["exposed_seconds"])
    parts = _step_parts(run, kinds)
    if parts is None:
        return None
    binned = [thinned(part, _BINS) for part in parts]
    steps = [step for step, _ in binned[0]]
    totals = [sum(part[index][1] for part in binned) for index in range(len(steps))]
    top = 1.3 * sorted(totals)[int(0.95 * (len(totals) - 1))]  # a few slow steps must not flatten all others
    figure, axes = new_axes()
    hues = [light("blue"), *(light(KIND_HUES.get(kind, "grey")) for kind in kinds)]
    labels = ["computation and the rest", *(f"waiting for {kind}" for kind in kinds)]
    heights = [[milliseconds for _, milliseconds in part] for part in binned]
    areas = axes.stackplot(steps, heights, colors=hues, labels=labels, step="pre")
    areas[0].set_alpha(0.35)
    axes.set_ylim(0, top or None)
    dress(axes, "step", "ms of a step")
    add_legend(axes)
    return Chart("exposed", "Exposed communication", _anatomy_caption(run, numbers, totals, top), figure)


def _step_parts(run: RunRecord, kinds: Sequence[str]) -> list[list[tuple[float, float]]] | None:
    """Milliseconds of every measured step: computation and the rest first, then waiting for each kind; None without
    steps."""
    rows = [(record, count) for record, count in steady(run) if record.get("step_seconds") is not None]
    if not rows:
        return None
    waiting = [
        [(record["step"], 1e3 * (record.get("exposed") or {}).get(kind, 0.0) / count) for record, count in rows]
        for kind in kinds
    ]
    waited = [sum(series[index][1] for series in waiting) for index in range(len(rows))]
    rest = [(r["step"], max(0.0, 1e3 * r["step_seconds"] - some)) for (r, _), some in zip(rows, waited, strict=True)]
    return [rest, *waiting]


def _anatomy_caption(run: RunRecord, numbers: Mapping[str, Any], totals: Sequence[float], top: float) -> str:
    """The caption of exposed communication; says how many of the ``totals`` (ms) reach beyond the ``top`` (ms)."""
    exposed = numbers["exposed_seconds"]
    share = numbers["exposed_share"] or 0.0
    parts = ", ".join(f"{kind} {format_duration(seconds)}" for kind, seconds in exposed.items())
    cut = [axis for axis in ("tp", "pp", "ep", "cp") if getattr(run.plan, axis) > 1 and axis not in exposed]
    uncounted = f" Exchanges of {' and '.join(cut)} are part of the rest." if cut else ""
    cut_off = sum(total > top for total in totals)
    most = format_duration(max(totals) / 1e3)
    beyond = f" {cut_off} of {len(totals)} bars reach beyond the picture, the highest to {most}." if cut_off else ""
    return (
        f"Where the time of a step goes, mean over ranks: computation waits for communication {100 * share:.1f} % of "
        f"it ({parts or 'nothing'}); what is not seen here is hidden behind computation.{uncounted}{beyond}"
    )


def _bytes(numbers: Mapping[str, Any]) -> Chart | None:
    sent = numbers["bytes_per_step"]
    if not sent:
        return None
    figure, axes = new_axes(height=1.1 + 0.42 * len(sent))
    scale, unit = byte_scale(max(sum(hops.values()) for hops in sent.values()))
    inside = [hops["inside"] / scale for hops in sent.values()]
    across = [hops["across"] / scale for hops in sent.values()]
    rows = range(len(sent))
    axes.barh(rows, inside, color=light("blue"), alpha=0.45, label="inside nodes", height=0.6)
    axes.barh(rows, across, left=inside, color=light("orange"), label="across nodes", height=0.6)
    dress_rows(axes, f"{unit} of a step, all ranks", list(sent))
    add_legend(axes)
    total = format_bytes(sum(hops["across"] for hops in sent.values()))
    caption = (
        f"Encoded bytes that all ranks send in a step, by lane (tp and pp: by axis) and hop; {total} cross nodes. "
        "The table below has every figure."
    )
    return Chart("bytes", "Bytes by hop and lane", caption, figure)


def _memory(run: RunRecord, numbers: Mapping[str, Any]) -> Chart | None:
    over_time = {
        kind: [(r["step"], (r.get("memory") or {})[kind]) for r in of_plan(run) if kind in (r.get("memory") or {})]
        for kind in numbers["memory"]
    }
    if not over_time:
        return None
    by_rank = numbers["memory_by_rank"]
    figure = new_figure()
    left, right = figure.subplots(1, 2, sharey=True) if by_rank else (figure.add_subplot(), None)
    scale, unit = byte_scale(max(numbers["memory"].values()))
    for kind, points in over_time.items():
        scaled = thinned([(x, y / scale) for x, y in points])
        left.plot(*columns_of(scaled), color=light(_MEMORY[kind][1]), label=_MEMORY[kind][0])
    left.set_ylim(bottom=0)
    dress(left, "step", unit)
    add_legend(left)
    if right is not None:
        _draw_memory_by_rank(right, by_rank, scale)
    highest = ", ".join(f"{_MEMORY[kind][0]} {format_bytes(most)}" for kind, most in numbers["memory"].items())
    if by_rank:
        meaning = "Left: the rank that uses most, over steps. Right: the most that each rank was seen to use."
    else:
        meaning = "The rank that uses most, over steps; the run has no figures by rank."
    return Chart("memory", "Memory by rank", f"{meaning} At most: {highest}.", figure)


def _draw_memory_by_rank(axes: Axes, by_rank: Mapping[str, Sequence[float]], scale: float) -> None:
    """Draw bars side by side for the kinds of memory of each rank, in units of ``scale`` bytes."""
    from matplotlib.ticker import MaxNLocator

    width = 0.8 / len(by_rank)
    for number, (kind, amounts) in enumerate(by_rank.items()):
        places = [rank + (number - (len(by_rank) - 1) / 2) * width for rank in range(len(amounts))]
        axes.bar(places, [amount / scale for amount in amounts], width, color=light(_MEMORY[kind][1]), alpha=0.75)
    dress(axes, "rank", "")
    locator = axes.xaxis.get_major_locator()
    assert isinstance(locator, MaxNLocator)
    locator.set_params(integer=True)
    axes.grid(visible=False, axis="x")


def _prediction(comparison: RunComparison | None) -> Chart | None:
    known = [q for q in comparison.quantities if q.error is not None] if comparison is not None else []
    if comparison is None or not known:
        return None
    figure, axes = new_axes(height=1.0 + 0.3 * len(known))
    errors = [100 * (q.error or 0.0) for q in known]
    rows = range(len(known))
    axes.barh(rows, errors, color=[light("orange" if error > 0 else "blue") for error in errors], height=0.55)
    axes.axvline(0, color=light("ink"), linewidth=0.8)
    x_name = "predicted over measured, % too much (right) or too little (left)"
    dress_rows(axes, x_name, [q.name for q in known])
    caption = (
        f"What the simulator says of this plan on this profile against the {comparison.of_what}. Waiting "
        "and bytes are of a rank and step."
    )
    return Chart("prediction", "Predicted against measured", caption, figure)
