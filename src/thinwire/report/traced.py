"""One step out of a merged trace, to draw it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import DataError
from thinwire.program.timeline import STEP, Span


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
