"""Reports: the figures of a run, self-contained pages, and pages about failed runs."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from tests.support.profiles import profile
from tests.support.reports import Page, record, write_run, write_trace
from typer.testing import CliRunner, Result

from thinwire.cli.main import app
from thinwire.errors import DataError, UsageError
from thinwire.record import read_run, read_runs, steps_of
from thinwire.report.charts import read_step
from thinwire.report.figures import differences, figures
from thinwire.report.page import Subject, write_page
from thinwire.train.directory import RunDirectory
from thinwire.train.observing.measure import FIGURES


def report(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def page_of(tmp_path: Path, *runs: Path) -> Page:
    written = write_page(tmp_path / "page", [Subject(run, unpredicted="not asked for") for run in read_runs(runs)])
    assert all(path.stat().st_size > 500 for path in written)
    return Page(written[0])


def test_figures_are_those_of_a_step(tmp_path: Path) -> None:
    numbers = figures(read_run(write_run(tmp_path / "run")))
    assert numbers["steps"] == 12
    assert numbers["tokens"] == 12 * 256
    assert numbers["step_seconds"] == pytest.approx(0.1)
    assert numbers["samples_per_second"] == pytest.approx(2560 / 32)
    assert numbers["exposed_seconds"] == {"gather": pytest.approx(0.01)}, "records are about two steps"
    assert numbers["exposed_share"] == pytest.approx(0.1)
    assert numbers["codec_seconds"] == {"gather": pytest.approx(0.001)}
    assert numbers["bytes_per_step"] == {
        "gather": {"inside": 1000, "across": 4000},
        "reduce": {"inside": 0, "across": 2000},
    }
    assert numbers["final_val_loss"] == pytest.approx(4.3)
    assert (numbers["best_val_loss"], numbers["best_val_step"]) == (pytest.approx(4.3), 12)
    assert numbers["memory_by_rank"] == {"rss": [(300 - rank) << 20 for rank in range(4)]}


def test_waiting_is_a_part_of_the_steps_in_which_it_was(tmp_path: Path) -> None:
    """A few steps that stall are most of the waiting, and of the time."""
    stalled = {"step_seconds": 4.9, "exposed": {"gather": 2 * 4.8}, "tokens_per_second": 256 / 4.9}
    numbers = figures(
        read_run(
            write_run(
                tmp_path / "run",
                [record(step, **stalled) if step % 20 == 0 else record(step) for step in range(2, 87, 2)],
            )
        )
    )  # 40 records after those of the warm-up, 4 of them stalled
    seconds, waited = 0.9 * 0.1 + 0.1 * 4.9, 0.9 * 0.01 + 0.1 * 4.8
    assert numbers["step_seconds"] == pytest.approx(seconds)
    assert numbers["exposed_seconds"] == {"gather": pytest.approx(waited)}
    assert numbers["exposed_share"] == pytest.approx(waited / seconds)
    assert numbers["tokens_per_second"] == pytest.approx(256 / seconds)


def test_a_record_after_a_continuation_is_about_the_steps_since_then(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [record(4, per_record=4), record(8), record(12, per_record=4)])
    RunDirectory(path).note_start(6, {"plan": "zero1"})
    assert steps_of(read_run(path)) == [4, 2, 4]
    RunDirectory(path).note_start(3, {"plan": "zero1"})  # step 6 is gone, and so is what began there
    assert steps_of(read_run(path)) == [1, 4, 4]
    (path / "starts.jsonl").unlink()
    assert steps_of(read_run(path)) == [2, 4, 4], "without a list of starts the first record is as wide as log_every"


@pytest.mark.parametrize("key", ["fingerprint", "plan"])
def test_figures_are_those_of_the_current_plan(tmp_path: Path, key: str) -> None:
    slow = [record(step, step_seconds=0.9, memory={"rss": 8 << 30}) for step in range(2, 13, 2)]
    path = write_run(tmp_path / "run", [*slow, *(record(step) for step in range(14, 25, 2))])
    plans: list[dict[str, str]] = [{"plan": "zero3"}, {"plan": "zero3"}]  # which says nothing of micro-batches
    for start, plan, name in zip((0, 12), plans, ("before", "now"), strict=True):
        RunDirectory(path).note_start(start, {**plan, key: name})
    numbers = figures(read_run(path))
    assert numbers["step_seconds"] == pytest.approx(0.1)
    assert numbers["memory"] == {"rss": 300 << 20}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two runs: the first was traced, name and tokenizer of the second look like markup."""
    directory = tmp_path_factory.mktemp("compared")
    strange = {"optimizer.lr": 0.5, "data.tokenizer": "<script>alert(1)</script>"}
    runs = [write_run(directory / "one"), write_run(directory / ("<u>&amp;'" + "very-long-" * 8), **strange)]
    write_trace(runs[0])
    return write_page(directory / "page", [Subject(run, unpredicted="not asked for") for run in read_runs(runs)])[0]


def test_a_page_needs_nothing_else(compared: Path) -> None:
    page = Page(compared)
    assert page.tags.count("svg") == 8 + 7 + 4, "of the runs, the first with a timeline, and of both"
    for words in ("zero3 on mesh 2x2", "thinwire train recipe.toml", "4.3000", "2,560", "25.0 %", "10.0 %", "complete"):
        assert words in page.text, words
    assert "Step 4, 100 ms on rank 0" in page.text
    files = {file.name for file in compared.parent.iterdir()}
    charts = ("loss", "gradient", "throughput", "mfu", "exposed", "bytes", "memory", "timeline")
    assert {f"one-{chart}.png" for chart in charts} <= files
    assert json.loads((compared.parent / "one-steps-3-4.json").read_text())["traceEvents"], "the trace for Perfetto"


def test_text_of_a_run_is_no_markup(compared: Path) -> None:
    page = Page(compared)
    assert "u" not in page.tags
    assert "<u>&amp;'very-long-" in page.text
    assert "<script>alert(1)</script>" in page.text


def test_several_runs_are_overlaid_and_their_differences_named(compared: Path, tmp_path: Path) -> None:
    page = Page(compared)
    assert "2 runs compared" in page.text
    assert "optimizer.lr 0.0003 0.5" in page.text
    files = {file.name for file in compared.parent.iterdir()}
    assert {"compared-loss.png", "compared-throughput.png", "compared-step.png", "compared-bytes.png"} <= files
    runs = [write_run(tmp_path / "one"), write_run(tmp_path / "two", **{"optimizer.lr": 0.5, "train.seed": 7})]
    assert differences(read_runs(runs)) == [("train.seed", ["0", "7"]), ("optimizer.lr", ["0.0003", "0.5"])]


def test_runs_of_one_name_get_distinct_labels_and_none_counts_twice(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run")]
    assert [run.name for run in read_runs(runs)] == ["a/run", "b/run"]
    with pytest.raises(UsageError, match="named twice"):
        read_runs([runs[0], runs[1], runs[0]])


def test_the_memory_of_gpus_is_drawn_by_kind(tmp_path: Path) -> None:
    used = {"rss": 2 << 30, **{kind: (60 + number) << 30 for number, kind in enumerate(FIGURES)}}
    by_rank = {kind: [amount] * 4 for kind, amount in used.items()}
    said = "rank 2 on gpu7 ran out of room"
    path = write_run(tmp_path / "run", [record(12, memory=used, memory_by_rank=by_rank, retries=3, allocator=said)])
    text = page_of(tmp_path, path).text
    assert "peak memory of the GPU 60 GiB, held by its allocator 61 GiB, idle in pieces 62 GiB" in text
    assert f"Step 12: {said}" in text


@pytest.mark.slow
def test_the_report_shows_a_crash_and_a_continuation(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", complete=False)
    RunDirectory(path).note_start(6, {"plan": "zero1 on mesh 1x2", "time": 1_000_000_000})
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 14, "lo')
    run = read_run(path)
    assert (run.last_step, run.unreadable, run.status) == (12, 1, "unfinished")
    page = page_of(tmp_path, path)
    assert "1 line of metrics.jsonl that cannot be read" in page.text
    assert "The run is not complete: it has logged step 12 of 12." in page.text
    assert "Started again after step 6 at 2001-09-09 01:46 UTC under zero1 on mesh 1x2." in page.text


@pytest.mark.slow
def test_pages_name_the_hosts_that_a_topology_has_ordered(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    assert "in the order of the mesh" not in page_of(tmp_path, path).text
    start = {"step": 0, "time": 1e9, "host": "a", "hosts": ["a", "c", "b"], "order": "leaf switches are those of hosts"}
    with (path / "starts.jsonl").open("a") as file:
        file.write(json.dumps(start) + "\n")
    text = page_of(tmp_path, path).text
    assert "Leaf switches are those of hosts. Hosts in the order of the mesh: a c b." in text


def test_numbers_that_are_none_cost_their_lines_and_no_traceback(tmp_path: Path) -> None:
    records = [record(step, step_seconds=None, skipped_steps=None) for step in range(2, 21, 2)]
    path = write_run(tmp_path / "run", records)
    good = json.loads((path / "metrics.jsonl").read_text().splitlines()[0])
    with (path / "metrics.jsonl").open("a") as file:
        for key, value in (("transfer", [1.0]), ("bytes", {"gather": [1]}), ("memory_by_rank", {"rss": 1})):
            file.write(json.dumps({**good, "step": 22, key: value}) + "\n")
    RunDirectory(path).note_start(6, {"plan": "zero1", "time": 1e18})
    result = report(path, "--json")
    assert result.exit_code == 0, result.output
    (numbers,) = json.loads(result.stdout)["runs"]
    assert (numbers["step_seconds"], numbers["unreadable_lines"]) == (None, 3)
    assert "Started again after step 6 at an unknown time" in Page(path / "report" / "index.html").text


@pytest.mark.slow
def test_the_report_names_missing_validation_and_peak(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [record(2, val_loss=None, mfu=None)], complete=False)
    page = page_of(tmp_path, path)
    assert "The run has not validated" in page.text
    assert "set train.peak_tflops" in page.text
    assert not (page.path.parent / "mfu.png").exists()


def test_a_failed_run_says_why_even_before_its_first_step(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [], complete=False)
    sentence = "thinwire.errors.NonFiniteError: step 3: the loss of rank 1 is not finite\nlower optimizer.lr\n"
    lost = "Traceback (most recent call last):\n  File ...\nthinwire.errors.CollectiveError: broken\n"
    later = time.time() + 5
    for rank, text in ((0, lost), (1, f"Traceback (most recent call last):\n  File ...\n{sentence}")):
        file = path / "logs" / f"rank-{rank}.traceback"
        file.write_text(text)
        os.utime(file, (later, later))
    run = read_run(path)
    assert run.status == "failed"
    assert run.failure == "rank 1: NonFiniteError: step 3: the loss of rank 1 is not finite\nlower optimizer.lr"
    page = page_of(tmp_path, path)
    assert "the loss of rank 1 is not finite" in page.text
    assert "No step was logged" in page.text
    assert "svg" not in page.tags
    RunDirectory(path).note_start(0, {"time": later + 5})
    assert read_run(path).status == "unfinished", "the failure was of the start before"


def test_a_path_without_a_run_is_refused_in_one_sentence(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one")
    (tmp_path / "recipe.toml").touch()
    for path, sentence in (
        (tmp_path / "absent", "does not exist; give the directory of a run"),
        (tmp_path / "recipe.toml", "recipe.toml is a file; give the directory of a run"),
        (tmp_path / "runs", "name one of the runs in it: one"),
    ):
        result = report(path)
        assert result.exit_code == 1
        assert sentence in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_the_command_prints_figures_with_what_was_predicted(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {str(i): i for i in range(512)}}}))
    profile().write(path / "profile.json")
    result = report(path, "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["runs"][0]["final_val_loss"] == pytest.approx(4.3)
    assert Path(printed["page"]) == path / "report" / "index.html"
    assert all(Path(file).is_file() for file in printed["files"])
    by_name = {row["name"]: row for row in printed["runs"][0]["predicted"]}
    assert by_name["step"]["measured"] == pytest.approx(0.1)
    assert by_name["step"]["predicted"] > 0
    assert {"loss.png", "prediction.png"} <= {Path(file).name for file in printed["files"]}
    page = Page(Path(printed["page"]))
    assert "Predicted against measured" in page.text
    assert "waiting for gather" in page.text


@pytest.mark.slow
def test_a_prediction_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [record(2)])
    profile().write(tmp_path / "profile.json")
    result = report(path, "--profile", tmp_path / "profile.json")
    assert result.exit_code == 0, result.output
    assert "train longer" in result.stdout
    assert "train longer" in Page(path / "report" / "index.html").text
    result = report(path, "--profile", tmp_path / "absent.json")
    assert result.exit_code == 1
    assert "cannot be read as a profile" in result.stderr


def test_a_step_of_a_trace_is_cut_out_of_it(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    write_trace(path)
    step = read_step(path / "traces" / "steps-3-4.json")
    assert step.name == "step 4"
    assert step.seconds == pytest.approx(0.1)
    waits = [span for span in step.by_rank[1] if span.track == "waiting"]
    assert [(round(span.start, 6), round(span.end, 6)) for span in waits] == [(0.05, 0.07)]
    assert {span.track for span in step.by_rank[0]} == {"compute", "waiting", "gather gather-across"}
    for text in ('{"traceEvents": [', "[" * 10_000):
        (path / "traces" / "steps-3-4.json").write_text(text)
        with pytest.raises(DataError, match="cannot be read as the trace"):
            read_step(path / "traces" / "steps-3-4.json")


# -- in a browser ------------------------------------------------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)")

ASK = """
const shown = [...document.querySelectorAll("figure svg text")];
const placed = [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll") && !e.closest("svg"));
const widest = Math.max(...placed.map(e => e.getBoundingClientRect().right));
document.body.dataset.found = JSON.stringify({
  loaded: performance.getEntriesByType("resource").map(e => e.name),
  window: document.documentElement.clientWidth, widest: widest, scroll: document.documentElement.scrollWidth,
  texts: shown.length, visible: shown.filter(e => e.getBoundingClientRect().width > 0).length,
  ink: getComputedStyle(shown[0]).fill, card: getComputedStyle(document.querySelector("figure")).backgroundColor,
  figures: [...document.querySelectorAll("figure svg")].map(e => e.getBoundingClientRect().height),
  title: document.title,
});
"""


def chromium(*arguments: str) -> str:
    """Run Chromium without a window, where no name resolves."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=2000"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=True, timeout=120).stdout


def asked(page: Path, *arguments: str) -> Mapping[str, Any]:
    """Measurements of a script in a copy of the page that, unlike the page, permits scripts."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
    copy = page.with_name("asked.html")
    copy.write_text(text.replace("</body>", f"<script>{ASK}</script></body>"))
    match = re.search(r'data-found="([^"]*)"', chromium(*arguments, "--dump-dom", copy.as_uri()))
    assert match is not None
    answer: Mapping[str, Any] = json.loads(html.unescape(match[1]))
    return answer


def brightness(colour: str) -> float:
    return sum(float(part) for part in re.findall(r"[\d.]+", colour)[:3]) / (3 * 255)


@in_browser
def test_a_browser_loads_nothing_for_it_and_it_fits_its_window(compared: Path) -> None:
    seen = asked(compared, "--window-size=1280,2000")
    assert seen["title"].endswith("thinwire report")
    assert seen["loaded"] == []
    assert seen["scroll"] <= seen["window"]
    assert seen["widest"] <= seen["window"] + 1
    assert seen["texts"] == seen["visible"] > 100
    assert len(seen["figures"]) == 8 + 7 + 4
    assert all(height > 60 for height in seen["figures"])
    assert brightness(seen["ink"]) < 0.4 < 0.9 < brightness(seen["card"])


@pytest.mark.slow
@in_browser
def test_in_a_browser_it_is_dark_where_that_is_wanted(compared: Path) -> None:
    seen = asked(compared, "--window-size=1280,2000", "--blink-settings=preferredColorScheme=0")
    assert brightness(seen["card"]) < 0.2 < 0.7 < brightness(seen["ink"])


@pytest.mark.slow
@in_browser
def test_in_a_browser_it_fits_a_narrow_window(compared: Path) -> None:
    seen = asked(compared, "--window-size=500,2000")
    assert seen["scroll"] <= seen["window"] <= 500


@pytest.mark.slow
@in_browser
def test_in_a_browser_a_screenshot_shows_something(compared: Path, tmp_path: Path) -> None:
    chromium("--window-size=1280,2000", f"--screenshot={tmp_path / 'shot.png'}", compared.as_uri())
    pixels = matplotlib.image.imread(tmp_path / "shot.png")
    assert pixels.shape[:2] == (2000, 1280)
    colours = {tuple(colour) for colour in (pixels[::7, ::7, :3] * 15).round().reshape(-1, 3).tolist()}
    assert len(colours) > 20
