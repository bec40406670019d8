"""Traced steps of a real run: the files, their common clock, and the report on them."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.reports import Page
from tests.support.small import BATCH, DATA, write_text

from thinwire.program.timeline import Span
from thinwire.record import read_run
from thinwire.report.page import Subject, write_page
from thinwire.spec.factor import Factor
from thinwire.spec.recipe import Recipe
from thinwire.spec.template import PlanTemplate
from thinwire.testing import run_ranks
from thinwire.train import loop
from thinwire.train.data.packing import prepare
from thinwire.train.directory import RunDirectory
from thinwire.train.launching.resolved import ResolvedRun
from thinwire.train.loop import StopRequest, train_rank
from thinwire.train.observing.metrics import MetricsLog
from thinwire.train.observing.tracing import Clocks, longest
from thinwire.train.trainer import Trainer

pytestmark = pytest.mark.ranks

RECIPE = f"""
plan = {{ preset = "zero3", compute_dtype = "float32", micro_batch = 2 }}
[model]
layers = 2
hidden = 32
heads = 2
{DATA}[train]
steps = 6
trace_steps = "3:5"
validate_every = 4
validation_samples = 4
{BATCH}[cluster]
nproc = 2
timeout = "60s"
"""


LATE = 1.0
"""Seconds that the first rank takes to open its logs."""


def opens_late(trainer: Trainer, notes: list[str], opens: Any = loop._open_log) -> MetricsLog:
    time.sleep(LATE)
    log: MetricsLog = opens(trainer, notes)
    return log


def trains(recipe: Path, directory: Path) -> None:
    """Be one rank of a run."""
    chosen = Recipe.load(recipe)
    plan = PlanTemplate.read(chosen).resolve(Factor(local=2))
    run = ResolvedRun(chosen, plan, RunDirectory(directory), node_ranks=2)
    if torch.distributed.get_rank() == 0:
        loop._open_log = opens_late
    with StopRequest(run.directory.stop_file, launched=True) as stop:
        train_rank(run, prepare(chosen.data), torch.device("cpu"), stop)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that traces steps 3 to 5, with a validation after the fourth."""
    directory = tmp_path_factory.mktemp("traced")
    write_text(directory / "text.txt", words=200)
    (directory / "recipe.toml").write_text(RECIPE)
    recipe = Recipe.read(directory / "recipe.toml")
    prepare(recipe.data)
    opened = RunDirectory(directory / "run")
    opened.open(recipe, PlanTemplate.read(recipe).resolve(Factor(local=2)), {"thinwire": "0"}, command="thinwire train")
    run_ranks(2, trains, opened.recipe, opened.path)
    assert json.loads(opened.summary.read_text())["steps"] == 6
    return opened.path


def test_the_first_step_begins_on_all_ranks_together(traced: Path) -> None:
    first = json.loads((traced / "metrics.jsonl").read_text().splitlines()[0])
    assert sum(first["exposed"].values()) < LATE / 2


def tracks(trace: Path) -> Mapping[int, Mapping[str, list[dict[str, Any]]]]:
    """Events by rank and track."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for event in events:
        if event["ph"] == "X":
            spans.setdefault(event["pid"], {}).setdefault(names[event["pid"], event["tid"]], []).append(event)
    return spans


def test_steps_are_traced_apart_from_what_comes_between_them(traced: Path) -> None:
    names = {path.name for path in (traced / "traces").iterdir()}
    assert names == {
        "steps-3-4.json",
        "step-5.json",
        *(f"torch-rank-{rank}-{steps}.json.gz" for rank in (0, 1) for steps in ("steps-3-4", "step-5")),
    }
    for rank in (0, 1):
        with gzip.open(traced / "traces" / f"torch-rank-{rank}-steps-3-4.json.gz") as file:
            assert any(event["name"] == "aten::mm" for event in json.load(file)["traceEvents"])


def test_a_merged_trace_has_every_rank_on_one_clock(traced: Path) -> None:
    by_rank = tracks(traced / "traces" / "steps-3-4.json")
    assert set(by_rank) == {0, 1}
    for track in by_rank.values():
        assert [event["name"] for event in track["step"]] == ["step 3", "step 4"]
        begin, end = track["step"][0]["ts"], track["step"][-1]["ts"] + track["step"][-1]["dur"]
        forwards = [event for event in track["compute"] if event["name"].startswith("forward layers.")]
        assert len(forwards) == 2 * 2 * 2, "two steps, two micro-batches, two layers"
        products = [
            e for name, events in track.items() if name.startswith("torch") for e in events if "mm" in e["name"]
        ]
        for event in (*forwards, *products):
            assert begin <= event["ts"] <= event["ts"] + event["dur"] <= end
        # torch's clock and the lanes' agree: every layer's forward holds products of matrices.
        for forward in forwards:
            inside = (forward["ts"], forward["ts"] + forward["dur"])
            assert any(inside[0] <= e["ts"] and e["ts"] + e["dur"] <= inside[1] for e in products)
    # A step ends with an exchange between all ranks: no rank's third is over before the other's fourth begins.
    third, fourth = ([by_rank[rank]["step"][number] for rank in (0, 1)] for number in (0, 1))
    assert max(e["ts"] for e in third) < min(e["ts"] for e in fourth)
    assert max(e["ts"] for e in third) < min(e["ts"] + e["dur"] for e in third)


@pytest.mark.slow
def test_the_report_shows_the_run_and_its_step(traced: Path, tmp_path: Path) -> None:
    written = write_page(tmp_path, [Subject(read_run(traced), unpredicted="not asked for")])
    page = Page(written[0])
    assert "Timeline of a step" in page.text
    assert "rank 1 compute" in page.text
    assert "Right: the most that each rank was seen to use." in page.text
    assert (tmp_path / "steps-3-4.json").read_bytes() == (traced / "traces" / "steps-3-4.json").read_bytes()


def test_clocks_of_hosts_are_aligned_by_what_they_show_after_barriers() -> None:
    readings = [
        [100.0, 101.0, 102.0],
        [100.0, 101.0, 102.2],  # the same host; once it left a barrier late
        [7.0, 8.001, 9.0],
        [7.0, 8.001, 9.0],
    ]
    clocks = Clocks.compare(["a", "a", "b", "b"], readings)
    assert clocks.offsets == (0.0, 0.0, pytest.approx(-93.0, abs=2e-3), clocks.offsets[2])
    assert clocks.spread < 2e-3


def test_the_longest_spans_stay() -> None:
    spans = [Span("compute", str(length), 0.0, float(length)) for length in (3, 1, 2)]
    assert longest(spans, 3) == spans
    assert [span.name for span in longest(spans, 2)] == ["3", "2"]
