"""Timelines as Chrome traces."""

from __future__ import annotations

import json

from thinwire.program.timeline import COMPUTE, WAITING, Timeline, chrome_trace


def test_ranks_become_processes_and_tracks_threads() -> None:
    timeline = Timeline()
    timeline.add("gather gather-inside", "gather layers.1", 10.002, 10.003)
    timeline.add(WAITING, "for gather layers.1", 10.0015, 10.003)
    timeline.add(COMPUTE, "forward layers.0", 10.001, 10.0015)
    trace = json.loads(json.dumps(chrome_trace({3: timeline.spans, 0: ()})))
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names == {0: COMPUTE, 1: WAITING, 2: "gather gather-inside"}, "computation on top"
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(span["name"], span["pid"], names[span["tid"]]) for span in spans] == [
        ("forward layers.0", 3, COMPUTE),
        ("for gather layers.1", 3, WAITING),
        ("gather layers.1", 3, "gather gather-inside"),
    ]
    assert [round(span["ts"]) for span in spans] == [0, 500, 1000], "microseconds from the first span"
    assert [round(span["dur"]) for span in spans] == [500, 1500, 1000]
    processes = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert processes == {0: "rank 0", 3: "rank 3"}


def test_no_spans_make_an_empty_trace() -> None:
    assert chrome_trace({})["traceEvents"] == []
